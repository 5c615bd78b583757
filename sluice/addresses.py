"""Addresses of servers, in the form `host:port` of settings, and a test for public addresses.

Pure.
"""

import ipaddress
import re

_FORM = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.%]{2,60}\]):([0-9]{1,5})")
_PORT_MAX = 65_535
# Network with all public unicast addresses of IPv6. IPv4 addresses are embedded in this network
# only by 6to4.
_UNICAST = ipaddress.ip_network("2000::/3")
# Networks without public hosts, which some versions of Python regard as global. These are 6to4 and
# its relays, protocol assignments, and documentation.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("2002::/16", "2001::/23", "3fff::/20", "192.0.0.0/24", "192.88.99.0/24"),
    )
)


def is_address(text: str) -> bool:
    """Return whether a text has the form `host:port`, with an IPv6 address in brackets."""
    found = _FORM.fullmatch(text)
    return found is not None and int(found[1]) <= _PORT_MAX


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address. An IPv6 host is returned without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to a host on the public internet."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found not in _UNICAST:
            return False
    if any(found in network for network in _SPECIAL):
        return False
    return found.is_global and not found.is_multicast
