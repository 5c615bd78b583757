"""A stand-in for an OpenID Connect provider: it speaks the protocol, and lies where it is told to."""

import asyncio
import base64
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

CLIENT, SECRET = "sluice-console", "a-client-secret"


def new_key() -> rsa.RSAPrivateKey:
    """Return a key to sign with."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class OpenIdSite:
    """The provider.

    Attributes:
        issuer: URL.
        person: Claims of whoever signs in next.
        changes: Claims of the next ID token that are other than they should be; None: left out.
        key: What ID tokens are signed with; `key_id` names it.
        algorithm: Of their signature.
        asked: Queries of all authorization requests.
    """

    def __init__(self) -> None:
        self.issuer = ""
        self.person: dict[str, Any] = {"sub": "ada", "name": "Ada", "groups": ["operators"]}
        self.changes: dict[str, Any] = {}
        self.key: Any = new_key()
        self.published = self.key
        self.key_id = "one"
        self.algorithm = "RS256"
        self.asked: list[dict[str, str]] = []
        self._codes: dict[str, dict[str, str]] = {}

    async def discovery(self, _: web.Request) -> web.Response:
        """Say what there is."""
        return web.json_response(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            }
        )

    async def authorize(self, request: web.Request) -> web.Response:
        """Let the person in, and send the browser back with a code."""
        query = dict(request.query)
        self.asked.append(query)
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        back = urlencode({"code": code, "state": query["state"], "iss": self.issuer})
        raise web.HTTPFound(f"{query['redirect_uri']}?{back}")

    async def token(self, request: web.Request) -> web.Response:
        """Exchange a code, once, for the holder of its verifier."""
        form = await request.post()
        asked = self._codes.pop(str(form["code"]), None)
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        is_it = asked is not None and asked["code_challenge"] == challenge
        if not is_it or asked is None or form.get("client_secret") != SECRET:
            return web.json_response({"error": "invalid_grant"}, status=400)
        assert form["redirect_uri"] == asked["redirect_uri"]
        return web.json_response(
            {"access_token": "x", "token_type": "Bearer", "id_token": self.id_token(asked["nonce"])}
        )

    def id_token(self, nonce: str) -> str:
        """Return an ID token of the person."""
        now = int(time.time())
        claims: dict[str, Any] = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300}
        claims |= {"nonce": nonce}
        claims |= self.person | self.changes
        claims = {name: it for name, it in claims.items() if it is not None}
        return jwt.encode(claims, self.key, self.algorithm, headers={"kid": self.key_id})

    async def keys(self, _: web.Request) -> web.Response:
        """Publish the key."""
        found = json.loads(RSAAlgorithm.to_jwk(self.published.public_key()))
        return web.json_response({"keys": [found | {"kid": self.key_id, "use": "sig"}]})


@asynccontextmanager
async def openid_site(port: int) -> AsyncGenerator[OpenIdSite]:
    """Run a provider on a port of this machine."""
    site = OpenIdSite()
    site.issuer = f"http://127.0.0.1:{port}"
    application = web.Application()
    application.add_routes(
        [
            web.get("/.well-known/openid-configuration", site.discovery),
            web.get("/authorize", site.authorize),
            web.post("/token", site.token),
            web.get("/keys", site.keys),
        ]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield site
    finally:
        async with asyncio.timeout(10):
            await runner.cleanup()
