"""ID tokens, roles of people, and the values of a sign-in."""

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from control_plane.access.openid import (
    OpenIdError,
    OpenIdSettings,
    actor_of,
    authorization_url,
    checked_claims,
    derived,
    is_fragment,
    is_state,
    read_openid,
)
from control_plane.access.roles import Role

ISSUER, NONCE = "https://id.example", "n" * 64
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
GIVEN: dict[str, Any] = {
    "issuer": ISSUER,
    "client_id": "console",
    "console_url": "https://ops.example/sluice/console/",
    "roles": [
        {"claim": "groups", "value": "sluice-admins", "role": "admin"},
        {"claim": "groups", "value": "acme", "role": "reader", "tenant_id": "acme"},
        {"claim": "email", "value": "vera@example.org", "role": "viewer"},
    ],
}
SETTINGS = OpenIdSettings.model_validate(GIVEN)


def public(key: rsa.RSAPrivateKey) -> jwt.PyJWK:
    found = json.loads(RSAAlgorithm.to_jwk(key.public_key()))
    return jwt.PyJWK(found | {"alg": "RS256"})


def token(key: Any = KEY, algorithm: str = "RS256", **changes: Any) -> str:
    now = int(time.time())
    claims: dict[str, Any] = {
        "iss": ISSUER,
        "aud": "console",
        "sub": "ada",
        "iat": now,
        "exp": now + 60,
    }
    claims |= {"nonce": NONCE} | changes
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, key, algorithm)


def test_a_whole_token_is_taken() -> None:
    claims = checked_claims(token(name="Ada"), public(KEY), SETTINGS, NONCE)
    assert claims["sub"] == "ada"
    both = token(aud=["console", "other"], azp="console")
    assert checked_claims(both, public(KEY), SETTINGS, NONCE)["sub"] == "ada"


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://evil.example"},
        {"iss": ISSUER + "/"},
        {"aud": "another"},
        {"aud": ["console", "other"]},
        {"azp": "other"},
        {"exp": int(time.time()) - 3600},
        {"exp": None},
        {"iat": int(time.time()) + 3600},
        {"iat": None},
        {"sub": None},
        {"nonce": None},
        {"nonce": "m" * 64},
        {"key": OTHER_KEY},
        {"key": "a shared secret of thirty-two bytes!", "algorithm": "HS256"},
        {"key": None, "algorithm": "none"},
        {"algorithm": "RS512"},
    ],
)
def test_a_token_with_one_fault_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OpenIdError) as refused:
        checked_claims(token(**changes), public(KEY), SETTINGS, NONCE)
    assert refused.value.code == "wrong"


def test_a_clock_a_little_off_does_not_matter() -> None:
    late = token(exp=int(time.time()) - 30)
    assert checked_claims(late, public(KEY), SETTINGS, NONCE)


def test_the_first_role_that_fits_is_a_persons() -> None:
    ada = actor_of({"sub": "ada", "name": "Ada\n", "groups": ["acme", "sluice-admins"]}, SETTINGS)
    assert (ada.id, ada.role, ada.tenant_id, ada.name) == ("person/ada", Role.ADMIN, "", "Ada")
    bob = actor_of({"sub": "bob", "groups": "acme", "email": "b@example.org"}, SETTINGS)
    assert (bob.role, bob.tenant_id, bob.name) == (Role.READER, "acme", "b@example.org")
    for claims in ({"groups": ["acme-x"]}, {"groups": None}, {}, {"email": "x@example.org"}):
        with pytest.raises(OpenIdError) as refused:
            actor_of({"sub": "eve"} | claims, SETTINGS)
        assert refused.value.code == "unknown"


def test_a_strange_subject_is_hashed() -> None:
    actor = actor_of({"sub": "../../<b>\x00", "groups": "acme"}, SETTINGS)
    assert actor.id.removeprefix("person/").isalnum()


def test_values_of_a_sign_in_belong_to_its_secret() -> None:
    assert is_state(derived("one", "state"), "one")
    assert not is_state(derived("two", "state"), "one")
    assert not is_state("", "one")
    assert len({derived("one", it) for it in ("state", "nonce", "verifier")}) == 3
    url = authorization_url(f"{ISSUER}/authorize?tenant=x", SETTINGS, "one")
    query = {name: it[0] for name, it in parse_qs(urlsplit(url).query).items()}
    digest = hashlib.sha256(derived("one", "verifier").encode()).digest()
    assert query["code_challenge"] == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    assert query["redirect_uri"] == "https://ops.example/sluice/console/callback"
    assert query["scope"].split()[0] == "openid"
    assert derived("one", "verifier") not in url
    assert SETTINGS.cookie_path == "/sluice/console/"


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("", True),
        ("#/requests/req_1?tenant=a", True),
        ("//evil.example", False),
        ("https://evil.example", False),
        ("#/x\r\nSet-Cookie: a=b", False),
        ("#/<script>", False),
        ("#/" + "a" * 2000, False),
    ],
)
def test_only_a_place_within_the_console_is_come_back_to(text: str, *, may: bool) -> None:
    assert is_fragment(text) is may


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"issuer": "http://id.example"}, "issuer"),
        ({"issuer": "https://user@id.example"}, "issuer"),
        ({"console_url": "https://ops.example/console"}, "slash"),
        ({"roles": []}, "roles"),
        ({"roles": [{"claim": "g", "value": "x", "role": "reader"}]}, "tenant_id"),
        ({"roles": [{"claim": "g", "value": "x", "role": "king"}]}, "role"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    file = tmp_path / "openid.json"
    file.write_text(json.dumps(GIVEN | {"client_secret": "hush"} | change))
    with pytest.raises(ValueError, match=told) as wrong:
        read_openid(file)
    assert "hush" not in str(wrong.value)


def test_without_a_file_no_person_signs_in(tmp_path: Path) -> None:
    assert read_openid(None) is None
    with pytest.raises(ValueError, match="missing"):
        read_openid(tmp_path / "missing.json")
