"""Looks whether a process that we lost sight of has ended."""

import asyncio

from sluice.addresses import host_and_port

_TIMEOUT_S = 0.3


async def refuses(address: str) -> bool:
    """Return whether the machine at `host:port` answers that nobody listens there.

    That is what a process leaves behind that was killed. Anything else (an answer, none at all, no
    way there) says nothing: a frozen process is answered for, and the network may be at fault.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*host_and_port(address))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False
