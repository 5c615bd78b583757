"""Safe connections to hosts that users name, by resolving and checking each name once.

A name may resolve to any address, even to an address inside the platform. So for each connection
all addresses of the name are checked. The connection uses one of the checked addresses, which a
second look-up cannot replace.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from ipaddress import ip_address

from aiohttp.abc import AbstractResolver, ResolveResult

# Function of host, port and one of the host's addresses, which returns the reason for a refusal, or
# an empty string.
Refuse = Callable[[str, int, str], str]


class AddressRefusedError(PermissionError):
    """Raised for a connection to an address that is not permitted.

    Attributes:
        reason: Reason in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)
        self.reason = reason


def refused_for(error: BaseException) -> str:
    """Return the reason of a refusal, also inside an error of aiohttp, or an empty string."""
    inner = getattr(error, "os_error", error)
    return inner.reason if isinstance(inner, AddressRefusedError) else ""


def check_literal(host: str, port: int, refuse: Refuse) -> None:
    """Check an address in a URL, because aiohttp resolves only names.

    AddressRefusedError is raised if the address must not be called.
    """
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return
    if reason := refuse(host, port, host):
        raise AddressRefusedError(reason)


async def checked_addresses(
    host: str,
    port: int,
    refuse: Refuse,
    family: socket.AddressFamily = socket.AF_UNSPEC,
) -> list[ResolveResult]:
    """Return the addresses of a host, all of which may be called.

    Raises:
        AddressRefusedError: A connection to one of the addresses is not permitted.
        OSError: The name cannot be resolved.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
    for *_, address in found:
        if reason := refuse(host, port, str(address[0])):
            raise AddressRefusedError(reason)
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=port,
            family=one_family,
            proto=protocol,
            flags=socket.AI_NUMERICHOST,
        )
        for one_family, _, protocol, _, address in found
    ]


class CheckedResolver(AbstractResolver):
    """Resolves names for aiohttp to addresses that may be called."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the result of `checked_addresses`."""
        return await checked_addresses(host, port, self._refuse, family)

    async def close(self) -> None:
        """Do nothing, because the resolver has no resources."""
