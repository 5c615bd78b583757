"""Reads Triton's own metrics. They need no secret, so Triton serves them on the loopback only."""

import asyncio

from replica.agent.triton import LOOPBACK

_TIMEOUT_S = 4.0
_BYTES_MAX = 8 << 20


async def engine_metrics(port: int) -> bytes:
    """Return the text exposition of the Triton whose metrics are at this port.

    Raises:
        OSError: The engine does not answer in time, or its answer is not metrics.
    """
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=_BYTES_MAX)
        try:
            writer.write(f"GET /metrics HTTP/1.0\r\nHost: {LOOPBACK}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(value)
                for name, _, value in (line.partition(b":") for line in head.split(b"\r\n"))
                if name.lower() == b"content-length"
            )
            if b" 200 " not in head.partition(b"\r\n")[0] or length > _BYTES_MAX:
                raise OSError(f"port {port} answered {head[:80]!r}")
            return await reader.readexactly(length)
        except (EOFError, StopIteration, ValueError, asyncio.LimitOverrunError) as error:
            raise OSError(f"port {port} speaks no HTTP: {error}") from None
        finally:
            writer.close()
