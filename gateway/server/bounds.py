"""The bounds of a worker's server for all versions of HTTP."""

from dataclasses import dataclass

from sluice.errors import ErrorCode, PlatformError, RejectedError

# Connections above the bound that are still read, because some of them may be probes.
SURPLUS_CONNECTIONS = 64
# Seconds for which the rest of a request is read and dropped after an early answer. Otherwise the
# connection would be reset, and the client's kernel would discard the answer.
LINGER_S = 5.0
# Seconds without progress after which a client with unread bytes is disconnected.
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one worker.

    Attributes:
        connections_max: Largest number of open connections. Beyond it, only probes are answered.
        head_timeout_s: Seconds from the first byte of a request's head to its end. For the first
            request of a connection, the time begins with the connection.
        idle_timeout_s: Seconds for which a connection may be silent between requests.
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
