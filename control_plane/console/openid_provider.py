"""A client of an OpenID Connect provider, for its endpoints, tokens and keys."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import jwt

from control_plane.access.openid import OpenIdError, OpenIdSettings, derived, key_id

_DEADLINE_S = 10.0
_BYTES_MAX = 1 << 20
_FRESH_S = 3600.0  # seconds after which the provider's keys are read again
# shortest pause in seconds before keys are read again because of an unknown key
_REFRESH_PAUSE_S = 60.0


class OpenIdProvider:
    """An OpenID Connect provider. Its published documents are cached for an hour."""

    def __init__(self, session: aiohttp.ClientSession, settings: OpenIdSettings) -> None:
        self._session = session
        self._settings = settings
        self._published: Mapping[str, Any] = {}
        self._published_at = -_FRESH_S
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._keys_at = -_FRESH_S
        self._lock = asyncio.Lock()

    async def endpoint(self, name: str) -> str:
        """Return the URL of one of the provider's endpoints.

        Raises:
            OpenIdError: The provider does not answer, or has no such endpoint.
        """
        async with self._lock:
            if time.monotonic() - self._published_at > _FRESH_S:
                found = await self._fetch("GET", self._settings.discovery_url)
                if found.get("issuer") != self._settings.issuer:
                    raise OpenIdError(
                        "wrong", "the provider names another issuer than the settings"
                    )
                self._published, self._published_at = found, time.monotonic()
        url = str(self._published.get(name, ""))
        is_safe = url.startswith("https://") or not self._settings.issuer.startswith("https://")
        if not url or not is_safe:
            raise OpenIdError("wrong", f"the provider publishes no usable {name}")
        return url

    async def id_token(self, code: str, secret: str) -> str:
        """Return the ID token for an authorization code, which is valid only once.

        Raises:
            OpenIdError: The provider refuses the code, or does not answer.
        """
        settings = self._settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": settings.callback_url,
            "client_id": settings.client_id,
            "code_verifier": derived(secret, "verifier"),
        }
        if text := settings.client_secret.get_secret_value():
            form["client_secret"] = text
        found = await self._fetch("POST", await self.endpoint("token_endpoint"), data=form)
        return str(found.get("id_token", ""))

    async def key_of(self, id_token: str) -> jwt.PyJWK:
        """Return the provider's key that has signed an ID token.

        Raises:
            OpenIdError: The provider has no such key, or does not answer.
        """
        wanted, url = key_id(id_token), await self.endpoint("jwks_uri")
        async with self._lock:
            age_s = time.monotonic() - self._keys_at
            if age_s > _FRESH_S or (self._key(wanted) is None and age_s > _REFRESH_PAUSE_S):
                found = await self._fetch("GET", url)
                try:
                    keys = jwt.PyJWKSet.from_dict(found).keys
                except (jwt.PyJWTError, ValueError, TypeError) as error:
                    raise OpenIdError("wrong", f"the provider's keys: {error}") from None
                self._keys = {it.key_id or "": it for it in keys if it.public_key_use != "enc"}
                self._keys_at = time.monotonic()
        if (key := self._key(wanted)) is None:
            raise OpenIdError("wrong", "the provider has no key of this id")
        return key

    def _key(self, wanted: str) -> jwt.PyJWK | None:
        """Return a key by its id. If the provider has a single key, the id may be empty."""
        if not wanted and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(wanted)

    async def _fetch(self, method: str, url: str, **sent: Any) -> dict[str, Any]:
        try:
            async with self._session.request(method, url, allow_redirects=False, **sent) as answer:
                body = await answer.content.read(_BYTES_MAX)
                status = answer.status
            found = json.loads(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise OpenIdError("away", f"{url}: {type(error).__name__}") from None
        if status != 200 or not isinstance(found, dict):
            reason = found.get("error", "") if isinstance(found, dict) else ""
            raise OpenIdError("wrong", f"{url} answers {status} {str(reason)[:100]}")
        return found  # pyright: ignore[reportUnknownVariableType]


@asynccontextmanager
async def open_provider(settings: OpenIdSettings | None) -> AsyncGenerator[OpenIdProvider | None]:
    """Open a client of the provider, which need not run yet. Without settings, yield None."""
    if settings is None:
        yield None
        return
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        yield OpenIdProvider(session, settings)
