"""The rules on import sources, and the check of a URI against the rules. Pure.

A control plane can reach addresses that its callers cannot reach. So a source must be in a
directory, bucket or host that an operator has allowed. The addresses of a host must be public,
unless the host was allowed with its port, which permits any address.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

_URI_CHARACTERS_MAX = 2048
_PORTS = {"http": 80, "https": 443}


class ImportSourceError(ValueError):
    """A source is not allowed. The message names the allowed sources."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed sources of imports.

    Attributes:
        roots: Paths of directories of this machine.
        hosts: `host` for public addresses, `host:port` for any address.
        buckets: Buckets of S3.
    """

    roots: tuple[str, ...]
    hosts: tuple[str, ...]
    buckets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportSource:
    """The parsed source of an import.

    Attributes:
        scheme: `file`, `http`, `https` or `s3`.
        place: Host, bucket, or the allowed directory.
        path: Path below the directory or prefix. For http(s) the path begins with a slash.
        port: Port of an http(s) host.
        is_private: Whether the host may have addresses that are not public.
    """

    scheme: str
    place: str
    path: str
    port: int = 0
    is_private: bool = False


def parse_source(uri: str, allowed: Allowed) -> ImportSource:
    """Return the source of a URI.

    Raises:
        ImportSourceError: The URI is not valid or not allowed.
    """
    parts = _split(uri)
    if parts is None or "\\" in uri or parts.query or parts.fragment or "@" in parts.netloc:
        raise ImportSourceError("a URI without user, query and fragment is expected")
    if parts.scheme == "file" and not parts.netloc:
        return _directory(unquote(parts.path), allowed)
    if parts.scheme == "s3" and parts.netloc:
        if parts.netloc not in allowed.buckets:
            raise _not_allowed(f"bucket {parts.netloc}", allowed.buckets)
        return ImportSource("s3", parts.netloc, parts.path.strip("/"))
    if parts.scheme in _PORTS and parts.hostname:
        return _host(uri, allowed)
    raise ImportSourceError(
        "file:///directory, s3://bucket/prefix or https://host/directory is expected, or an"
        " adapter's .safetensors in one"
    )


def _split(uri: str) -> SplitResult | None:
    if len(uri) > _URI_CHARACTERS_MAX or not uri.isprintable():
        return None
    try:
        return urlsplit(uri)
    except ValueError:
        return None


def _directory(path: str, allowed: Allowed) -> ImportSource:
    wanted = PurePosixPath(path)
    for root in allowed.roots:
        if wanted.is_relative_to(root) and ".." not in wanted.parts:
            return ImportSource("file", root, str(wanted.relative_to(root)))
    raise _not_allowed(f"directory {path:.200}", allowed.roots)


def _host(uri: str, allowed: Allowed) -> ImportSource:
    parts = urlsplit(uri)
    host = (parts.hostname or "").rstrip(".").lower()
    try:
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise ImportSourceError("the port is not a number from 1 to 65535") from None
    is_private = f"{host}:{port}" in allowed.hosts
    if not is_private and (host not in allowed.hosts or port != _PORTS[parts.scheme]):
        raise _not_allowed(f"host {host}:{port}", allowed.hosts)
    return ImportSource(parts.scheme, host, parts.path.rstrip("/") or "", port, is_private)


def _not_allowed(what: str, allowed: tuple[str, ...]) -> ImportSourceError:
    known = ", ".join(allowed) or "none"
    return ImportSourceError(
        f"nothing may be imported from {what}; an operator has allowed: {known}"
    )
