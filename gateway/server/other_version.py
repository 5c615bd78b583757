"""The interface of the HTTP/2 server that the HTTP/1.1 server uses, since both share a port."""

from typing import Any, Protocol


class OtherVersion(Protocol):
    """Serves connections whose first bytes are not HTTP/1.1."""

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether a request is being answered."""
        ...

    def take(self, connection: Any, data: bytes) -> bool:
        """Take over a connection (`HttpProtocol`) if its first bytes belong to this version.

        Returns whether the connection was taken over.
        """
        ...

    def say_goodbye(self) -> None:
        """Request that all clients connect to another server."""
        ...

    async def close(self, timeout_s: float) -> None:
        """End all connections. Running requests may end within `timeout_s` seconds."""
        ...
