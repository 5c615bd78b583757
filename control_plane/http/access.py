"""Who may use the admin REST: holders of the admin key."""

import hashlib
import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sluice.errors import ErrorCode, PlatformError

# For probes, scrapers and tools; all else needs the key.
_OPEN = ("/healthz", "/readyz", "/metrics", "/openapi.json")


def require_admin(key_sha256: str) -> Middleware:
    """Return a middleware that lets only the key with this SHA-256 (hex) in.

    Hashes are compared in constant time, so that answers do not tell how much of a key is right.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, key_sha256):
                raise PlatformError(
                    ErrorCode.INVALID_API_KEY,
                    "send the admin key as `Authorization: Bearer <key>`",
                )
        return await handler(request)

    return guard
