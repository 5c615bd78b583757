"""The bounds of a worker's server, whatever version of HTTP its clients speak."""

from dataclasses import dataclass

from sluice.errors import ErrorCode, PlatformError, RejectedError

# Over the bound this many more connections are read, for the probes among them.
SURPLUS_CONNECTIONS = 64
# The unread rest after an early answer is read and dropped for this long: else the client's
# kernel would throw the answer away.
LINGER_S = 5.0
# A client that has more to read now than this long ago is taken for gone.
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one worker.

    Attributes:
        connections_max: Largest number of open connections; beyond, only probes are answered.
        head_timeout_s: Seconds from its first byte (of the first request: from the connection)
            until a request's head is complete.
        idle_timeout_s: Seconds for which a kept-alive connection may be silent.
        body_bytes_max: Bytes of all unfinished bodies together.
    """

    connections_max: int = 20_000
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    body_bytes_max: int = 256 << 20


def too_many_connections() -> PlatformError:
    """Return the answer of a worker that has reached its bound of connections."""
    text = "The server has too many open connections; try again shortly."
    return RejectedError(ErrorCode.OVERLOADED, text, retry_after_s=1.0)
