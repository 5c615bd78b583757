"""The open requests that a split has assigned: a rollout depends on the oldest."""


class OpenRequests:
    """The open requests of one worker, by the gateway's id of each."""

    def __init__(self) -> None:
        """Begin with none."""
        self._received_at: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._received_at)

    def add(self, uid: str, received_at_unix_ms: int) -> None:
        """Note a request; a second call has no effect."""
        self._received_at[uid] = received_at_unix_ms

    def discard(self, uid: str) -> None:
        """Forget a request that has ended, if it was noted."""
        self._received_at.pop(uid, None)

    @property
    def oldest_unix_ms(self) -> int:
        """Return when the oldest open request was received; 0 without any.

        Reads all of them: they do not begin in the order in which they were received, and the
        method is called every few seconds.
        """
        return min(self._received_at.values(), default=0)
