"""The last replica of each session of a cell: only a preference of placement."""

from collections import OrderedDict

FORGOTTEN_AFTER_S = 300.0
SESSIONS_MAX = 65_536


class Sessions:
    """The last replica of each recent session; 0 is no session."""

    def __init__(self) -> None:
        # session -> (replica, when); least recently used first
        self._homes: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: int, now: float) -> str | None:
        """Return the last replica of a session; None: unknown or long ago."""
        entry = self._homes.get(session)
        if entry is None or now - entry[1] >= FORGOTTEN_AFTER_S:
            return None
        return entry[0]

    def seen(self, session: int, replica_id: str, now: float) -> None:
        """Note that a session is served by a replica."""
        if not session:
            return
        homes = self._homes
        homes[session] = (replica_id, now)
        homes.move_to_end(session)
        # Two for one: so the expired ones are gone after a while, at no visible cost.
        for _ in range(2):
            oldest = next(iter(homes))
            if len(homes) > SESSIONS_MAX or now - homes[oldest][1] >= FORGOTTEN_AFTER_S:
                del homes[oldest]

    def forget_replica(self, replica_id: str) -> None:
        """Drop a replica's sessions: its cache is gone."""
        lost = [session for session, entry in self._homes.items() if entry[0] == replica_id]
        for session in lost:
            del self._homes[session]
