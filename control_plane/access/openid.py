"""Sign-in of people by an OpenID Connect provider, with its requests, checks and roles. Pure.

A sign-in begins with a secret in a cookie of the browser. State, nonce and the PKCE verifier are
derived from this secret. So the server stores nothing, and an answer is valid only in the same
browser.
"""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlencode, urlsplit

import jwt
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from control_plane.access.roles import Actor, Role

LEEWAY_S = 60
_ROLES_MAX = 1000
_NAME_CHARS_MAX = 64
_LOOPBACK = r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?"
_URL = rf"^(https://[^\s/?#@]+|{_LOOPBACK})(/[^\s?#]*)?$"
_FRAGMENT = re.compile(r"#/[A-Za-z0-9/._~%?&=:@+,-]{0,1000}")
_DISCOVERY = "/.well-known/openid-configuration"


class OpenIdRole(BaseModel):
    """A role for every person whose claim equals `value`, or is a list that contains `value`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: Annotated[str, Field(min_length=1, max_length=200)]
    value: Annotated[str, Field(min_length=1, max_length=1000)]
    role: Role
    tenant_id: Annotated[str, Field(max_length=128)] = ""

    @model_validator(mode="after")
    def _has_its_tenant(self) -> Self:
        if bool(self.tenant_id) != self.role.has_tenant:
            raise ValueError("readers and publishers need a tenant_id; the other roles have none")
        return self


class OpenIdSettings(BaseModel):
    """Settings of the sign-in by a provider.

    Attributes:
        issuer: URL of the provider, exactly as in its ID tokens.
        client_id: Id of the console at the provider.
        client_secret: Secret of the console at the provider. It is empty for a public client, which
            only PKCE protects.
        console_url: Public URL of the console, which ends with a slash. The provider redirects
            people to `callback` below this URL.
        scopes: Scopes of the sign-in, which always include `openid`.
        name_claim: Claim with a person's name, for the audit log.
        roles: Roles in order. A person has the role of the first match, and is refused without a
            match.
        algorithms: Signature algorithms of ID tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: Annotated[str, Field(pattern=_URL, max_length=1000)]
    client_id: Annotated[str, Field(min_length=1, max_length=500)]
    client_secret: SecretStr = SecretStr("")
    console_url: Annotated[str, Field(pattern=_URL, max_length=1000)]
    scopes: Annotated[tuple[str, ...], Field(max_length=20)] = ("openid", "profile", "email")
    name_claim: str = "name"
    roles: Annotated[tuple[OpenIdRole, ...], Field(min_length=1, max_length=_ROLES_MAX)]
    algorithms: Annotated[
        tuple[Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"], ...],
        Field(min_length=1),
    ] = ("RS256", "PS256", "ES256", "EdDSA")

    @model_validator(mode="after")
    def _ends_with_a_slash(self) -> Self:
        if not self.console_url.endswith("/"):
            raise ValueError("console_url: leave out the slash at its end")
        return self

    @property
    def discovery_url(self) -> str:
        """URL of the provider's discovery document."""
        return self.issuer.rstrip("/") + _DISCOVERY

    @property
    def callback_url(self) -> str:
        """URL to which the provider redirects people after the sign-in."""
        return f"{self.console_url}callback"

    @property
    def cookie_path(self) -> str:
        """Path of the console in the URLs of browsers."""
        return urlsplit(self.console_url).path or "/"


class OpenIdError(Exception):
    """A sign-in failed.

    `code` is one of a closed list and is shown on the page. The text is only logged.
    """

    def __init__(self, code: Literal["denied", "away", "wrong", "unknown"], text: str) -> None:
        super().__init__(text)
        self.code = code


def read_openid(file: Path | None) -> OpenIdSettings | None:
    """Return the settings in a JSON file, or None if no file is configured.

    Raises:
        ValueError: The file is not valid. The message names the place, and never a secret.
    """
    if file is None:
        return None
    try:
        return OpenIdSettings.model_validate(json.loads(file.read_text()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{file}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def derived(secret: str, purpose: Literal["state", "nonce", "verifier"]) -> str:
    """Return one value of a sign-in as 64 hex digits, which reveal none of the other values."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_state(given: str, secret: str) -> bool:
    """Return, in constant time, whether an answer belongs to this browser's request."""
    expected = derived(secret, "state").encode()
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)


def is_fragment(text: str) -> bool:
    """Return whether a text is a valid fragment within the console, to return to after sign-in."""
    return not text or _FRAGMENT.fullmatch(text) is not None


def authorization_url(endpoint: str, settings: OpenIdSettings, secret: str) -> str:
    """Return the URL of the provider's sign-in page for a browser."""
    digest = hashlib.sha256(derived(secret, "verifier").encode()).digest()
    query = {
        "response_type": "code",
        "client_id": settings.client_id,
        "redirect_uri": settings.callback_url,
        "scope": " ".join(dict.fromkeys(("openid", *settings.scopes))),
        "state": derived(secret, "state"),
        "nonce": derived(secret, "nonce"),
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"


def key_id(id_token: str) -> str:
    """Return the id of the key that an ID token names, or an empty text if it names none.

    Raises:
        OpenIdError: The text is not a token.
    """
    try:
        return str(jwt.get_unverified_header(id_token).get("kid", ""))
    except jwt.PyJWTError as error:
        raise OpenIdError("wrong", f"the ID token cannot be read: {error}") from None


def checked_claims(
    id_token: str, key: jwt.PyJWK, settings: OpenIdSettings, nonce: str
) -> Mapping[str, Any]:
    """Return the claims of an ID token after a check of its signature and its claims.

    The checked claims are issuer, audience, times and nonce.

    Raises:
        OpenIdError: The signature or a claim is not valid.
    """
    try:
        claims: dict[str, Any] = jwt.decode(
            id_token,
            key,
            algorithms=list(settings.algorithms),
            audience=settings.client_id,
            issuer=settings.issuer,
            leeway=LEEWAY_S,
            options={"require": ["iss", "sub", "aud", "exp", "iat"]},
        )
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise OpenIdError("wrong", f"the ID token is refused: {error}") from None
    given = str(claims.get("nonce", "")).encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, nonce.encode()):
        raise OpenIdError("wrong", "the ID token has the nonce of another sign-in; sign in again")
    audience = claims["aud"]
    is_for_others = isinstance(audience, list) and len(audience) > 1
    if (is_for_others or "azp" in claims) and claims.get("azp") != settings.client_id:
        raise OpenIdError("wrong", "the ID token was made for another client (azp)")
    return claims


def actor_of(claims: Mapping[str, Any], settings: OpenIdSettings) -> Actor:
    """Return the actor for a person, with the role of the first entry of `roles` that matches.

    Raises:
        OpenIdError: No role matches this person.
    """
    for wanted in settings.roles:
        if _has(claims.get(wanted.claim), wanted.value):
            name = str(claims.get(settings.name_claim) or claims.get("email") or "")
            name = "".join(it for it in name if it.isprintable())[:_NAME_CHARS_MAX]
            return Actor(_id_of(str(claims["sub"])), wanted.role, wanted.tenant_id, name)
    raise OpenIdError(
        "unknown", "the settings give this person no role; an operator adds one to `roles`"
    )


def _has(held: Any, value: str) -> bool:
    return value in held if isinstance(held, list) else held == value


def _id_of(subject: str) -> str:
    """Return a person's id. A subject with unusual characters is hashed."""
    if re.fullmatch(r"[A-Za-z0-9._:@|-]{1,128}", subject):
        return f"person/{subject}"
    return f"person/{hashlib.sha256(subject.encode('utf-8', 'surrogateescape')).hexdigest()}"
