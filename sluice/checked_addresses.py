"""Addresses that others name: looked up once, checked, and connected to as checked.

A name may resolve to any address, even one inside the platform. So all addresses of a name are
checked for each connection, which then goes to a checked one: a second look-up cannot change it.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from ipaddress import ip_address

from aiohttp.abc import AbstractResolver, ResolveResult

# Takes host, port and one of the host's addresses; returns the reason not to call it, or nothing.
Refuse = Callable[[str, int, str], str]


class AddressRefusedError(PermissionError):
    """An address must not be called.

    Attributes:
        reason: Reason in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)
        self.reason = reason


def refused_for(error: BaseException) -> str:
    """Return the reason of a refusal, also of one inside an error of aiohttp; empty: it is none."""
    inner = getattr(error, "os_error", error)
    return inner.reason if isinstance(inner, AddressRefusedError) else ""


def check_literal(host: str, port: int, refuse: Refuse) -> None:
    """Check an address that stands in a URL itself: aiohttp resolves only names.

    AddressRefusedError: it must not be called.
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
        AddressRefusedError: One of them must not be called.
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
        """See `checked_addresses`."""
        return await checked_addresses(host, port, self._refuse, family)

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""
