"""Checks whether a process that has disconnected has ended."""

import asyncio

from sluice.addresses import host_and_port

_TIMEOUT_S = 0.3


async def refuses(address: str) -> bool:
    """Return whether `host:port` refuses the connection because no process listens.

    A refusal shows that the process has ended. Any other result (an answer, silence, no route)
    proves nothing. The kernel accepts connections for a frozen process, and the network may have
    failed.
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
