"""The last replica of each session of a cell, which placement prefers between near equals."""

from collections import OrderedDict

FORGOTTEN_AFTER_S = 300.0
SESSIONS_MAX = 65_536


class Sessions:
    """The last replica of each recent session.

    The session hash 0 means that there is no session.
    """

    def __init__(self) -> None:
        # Replica and time of the last request, by session, the least recently used session first.
        self._homes: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: int, now: float) -> str | None:
        """Return the last replica of a session, or None if it is unknown or too old."""
        entry = self._homes.get(session)
        if entry is None or now - entry[1] >= FORGOTTEN_AFTER_S:
            return None
        return entry[0]

    def seen(self, session: int, replica_id: str, now: float) -> None:
        """Record that a replica serves a session."""
        if not session:
            return
        homes = self._homes
        homes[session] = (replica_id, now)
        homes.move_to_end(session)
        # Each call examines the two oldest sessions, so that expired sessions are removed faster
        # than new sessions are added, at a constant cost per call.
        for _ in range(2):
            oldest = next(iter(homes))
            if len(homes) > SESSIONS_MAX or now - homes[oldest][1] >= FORGOTTEN_AFTER_S:
                del homes[oldest]

    def forget_replica(self, replica_id: str) -> None:
        """Drop the sessions of a replica whose cache is lost."""
        lost = [session for session, entry in self._homes.items() if entry[0] == replica_id]
        for session in lost:
            del self._homes[session]
