"""Addresses of servers, as settings and services tell them: `host:port`. Pure."""

import re

_FORM = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.%]{2,60}\]):([0-9]{1,5})")
_PORT_MAX = 65_535


def is_address(text: str) -> bool:
    """Return whether a text may be `host:port`; an IPv6 address stands in brackets."""
    found = _FORM.fullmatch(text)
    return found is not None and int(found[1]) <= _PORT_MAX


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address; the host without brackets, as sockets want it."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
