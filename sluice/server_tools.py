"""Facts about server tools that control plane and gateways share. Pure."""

from urllib.parse import urlsplit

SEALED_FOR = "headers of tools"


def header_place(tool_id: str, url: str, header: str) -> str:
    """Return the place for sealing a header, different for every tool, address and header."""
    parts = urlsplit(url)
    return f"{tool_id}\0{parts.scheme}://{parts.netloc.lower()}\0{header.lower()}"
