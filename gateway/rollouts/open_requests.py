"""Which requests that a split decided about are still open: a rollout counts on the oldest."""


class OpenRequests:
    """The open requests of one worker, by the gateway's id of each."""

    def __init__(self) -> None:
        """Begin with none."""
        self._received_at: dict[str, int] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._received_at)

    def add(self, uid: str, received_at_unix_ms: int) -> None:
        """Note a request; again is the same as once."""
        self._received_at[uid] = received_at_unix_ms

    def discard(self, uid: str) -> None:
        """Forget a request that has ended, if it was noted."""
        self._received_at.pop(uid, None)

    @property
    def oldest_unix_ms(self) -> int:
        """When the longest-running one was received; 0 without any.

        Looks at all of them: they do not begin in the order in which they were received, and this
        is asked every few seconds.
        """
        return min(self._received_at.values(), default=0)
