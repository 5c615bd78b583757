"""Facts that control plane and gateways share about tools that servers run. Pure."""

from urllib.parse import urlsplit

SEALED_FOR = "headers of tools"


def header_place(tool_id: str, url: str, header: str) -> str:
    """Return the place that a header is sealed for: no other tool, address or header opens it."""
    parts = urlsplit(url)
    return f"{tool_id}\0{parts.scheme}://{parts.netloc.lower()}\0{header.lower()}"
