"""The console's files, read once and served with a policy that permits no foreign code."""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from control_plane.http.routes import AdminRoute
from sluice.errors import ErrorCode, PlatformError

# The policy permits no inline code, no other hosts and no frames. Forms may only submit to this
# server.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers revalidate files, and an unchanged file is a 304
    "Vary": "Accept-Encoding",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FIRST = "index.html"


def folder() -> Path:
    """Return the directory of the files, in the checkout, or else in the installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for place in (package.parent / "console", package / "_data" / "console"):
        if (place / _FIRST).exists():
            return place
    raise RuntimeError(f"no console beside {package}: the installation is incomplete")


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file of the console, in the form that is sent."""

    content_type: str
    etag: str
    body: bytes
    packed: bytes  # body compressed by gzip


class ConsoleFiles:
    """Serves the files of a single directory."""

    def __init__(self, place: Path) -> None:
        self._files = {
            path.relative_to(place).as_posix(): _read(path)
            for path in sorted(place.rglob("*"))
            if path.suffix in _TYPES
        }

    def routes(self) -> list[AdminRoute]:
        """Return the routes, which need no key, because the page shows a form for the key."""
        return [
            AdminRoute("GET", "/console", self.enter, None),
            AdminRoute("GET", "/console/{path:.*}", self.get, None),
        ]

    async def enter(self, _: web.Request) -> web.Response:
        """Redirect to the page by a relative URL, because a proxy may strip a prefix."""
        return web.Response(status=308, headers={"Location": "console/"})

    async def get(self, request: web.Request) -> web.Response:
        """Return a file, or 304 if the browser already has this version."""
        found = self._files.get(request.match_info["path"] or _FIRST)
        if found is None:
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no {request.path[:200]}")
        headers = HEADERS | {"ETag": found.etag}
        if request.headers.get("If-None-Match") == found.etag:
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = found.content_type
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=found.packed, headers=headers | {"Content-Encoding": "gzip"})
        return web.Response(body=found.body, headers=headers)


def _read(path: Path) -> ConsoleFile:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return ConsoleFile(_TYPES[path.suffix], etag, body, gzip.compress(body, mtime=0))
