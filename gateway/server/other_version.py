"""The part of another version's server that the server of HTTP/1.1 uses: they share a port."""

from typing import Any, Protocol


class OtherVersion(Protocol):
    """Serves connections whose first bytes are no HTTP/1.1."""

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether a request is being answered."""
        ...

    def take(self, connection: Any, data: bytes) -> bool:
        """Take a connection (`HttpProtocol`) by its first bytes; return whether it was taken."""
        ...

    def say_goodbye(self) -> None:
        """Ask all clients to go elsewhere."""
        ...

    async def close(self, timeout_s: float) -> None:
        """End all connections; what runs has a while."""
        ...
