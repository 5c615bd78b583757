"""The open requests whose release a split has chosen. Rollouts wait for the oldest of them."""


class OpenRequests:
    """The open requests of one worker, by the gateway's id of each request."""

    def __init__(self) -> None:
        self._received_at: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._received_at)

    def add(self, uid: str, received_at_unix_ms: int) -> None:
        """Add a request. A second call for the same request has no effect."""
        self._received_at[uid] = received_at_unix_ms

    def discard(self, uid: str) -> None:
        """Remove a request that has ended, if it was added."""
        self._received_at.pop(uid, None)

    @property
    def oldest_unix_ms(self) -> int:
        """Unix time in milliseconds at which the oldest open request arrived, or 0 if none is open.

        The property scans all requests, because they are not added in the order of their arrival. A
        scan is cheap enough, because it happens only every few seconds.
        """
        return min(self._received_at.values(), default=0)
