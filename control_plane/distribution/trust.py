"""Temporary distrust of failing sources, of nodes that accuse every source, and of a slow store."""

from dataclasses import dataclass
from heapq import heappop, heappush

from control_plane.distribution.model import PlannerLimits, Trouble

_STORE_PAUSE_S = 1.0  # seconds of pause after the first failure, doubled by each further failure
_STORE_PAUSE_MAX_S = 30.0


@dataclass(slots=True)
class _Record:
    until_s: float = 0.0
    strikes: int = 0
    forgiven_s: float = 0.0  # time from which earlier strikes no longer count


class Trust:
    """The nodes that are not used as sources, and the nodes whose accusations are ignored.

    A corrupt chunk is attributed to its source, unless the accuser has accused many sources. In
    this case the accuser's memory or link is assumed to be broken.
    """

    def __init__(self, limits: PlannerLimits) -> None:
        self._limits = limits
        self._records: dict[int, _Record] = {}
        self._returns: list[tuple[float, int]] = []
        # accused sources by accuser, with the time until which each accusation counts
        self._accused: dict[int, dict[int, float]] = {}
        # nodes that count as faulty accusers, with the end of the suspicion
        self._suspects: dict[int, float] = {}

    def is_shunned(self, node: int) -> bool:
        """Return whether the node is excluded as a source, as of the last call of `returned`."""
        record = self._records.get(node)
        return record is not None and record.until_s > 0.0

    def is_suspect(self, accuser: int, now_s: float) -> bool:
        """Return whether the accuser is ignored, because it has accused many sources."""
        return self._suspects.get(accuser, 0.0) > now_s

    def accuse(self, accuser: int, source: int, trouble: Trouble, now_s: float) -> list[int]:
        """Record a failure, and return the newly excluded nodes (source, accuser or none)."""
        limits = self._limits
        if self.is_suspect(accuser, now_s):
            return []
        accused = self._accused.setdefault(accuser, {})
        for other in [other for other, until_s in accused.items() if until_s <= now_s]:
            del accused[other]
        is_corrupt = trouble is Trouble.CORRUPT
        # The nodes of a rack that lost its link accuse many sources, so these accusations expire
        # soon.
        remembered_s = limits.corrupt_shun_s if is_corrupt else limits.shun_s
        accused[source] = max(accused.get(source, 0.0), now_s + remembered_s)
        if len(accused) >= limits.accused_max:
            self._suspects[accuser] = now_s + remembered_s
            return self._shun(accuser, limits.corrupt_shun_s, now_s) if is_corrupt else []
        if is_corrupt:
            return self._shun(source, limits.corrupt_shun_s, now_s)
        record = self._records.setdefault(source, _Record())
        if record.until_s > 0.0:
            return []  # many nodes may report the same outage, which counts only once
        strikes = record.strikes if now_s < record.forgiven_s else 0
        record.strikes = strikes + 1
        shun_s = min(limits.shun_s * 2**strikes, limits.shun_max_s)
        return self._shun(source, shun_s, now_s)

    def returned(self, now_s: float) -> list[int]:
        """Return the nodes whose exclusion has ended."""
        back: list[int] = []
        while self._returns and self._returns[0][0] <= now_s:
            until_s, node = heappop(self._returns)
            record = self._records.get(node)
            if record is not None and record.until_s == until_s:
                record.until_s = 0.0
                record.forgiven_s = now_s + self._limits.shun_max_s
                self._accused.pop(node, None)
                back.append(node)
        return back

    def _shun(self, node: int, shun_s: float, now_s: float) -> list[int]:
        record = self._records.setdefault(node, _Record())
        was_shunned = record.until_s > 0.0
        until_s = now_s + shun_s
        if until_s > record.until_s:
            record.until_s = until_s
            heappush(self._returns, (until_s, node))
        return [] if was_shunned else [node]


class StoreGate:
    """Limits the concurrent readers of the store in a region.

    The limit falls while the store fails.
    """

    def __init__(self, limits: PlannerLimits) -> None:
        self._readers_max = limits.store_readers_max
        self._allowed = float(limits.store_readers_max)
        self._bytes_max = limits.store_bytes_s * limits.horizon_s
        self._pause_s = _STORE_PAUSE_S
        self._paused_until_s = 0.0
        self._orders: dict[int, int] = {}  # number of orders by reading node
        self._bytes = 0

    def admits(self, node: int, now_s: float) -> bool:
        """Return whether the node may have one more order for the store."""
        if now_s < self._paused_until_s or self._bytes >= self._bytes_max:
            return False
        return node in self._orders or len(self._orders) < int(self._allowed)

    def begin(self, node: int, size: int) -> None:
        """Record a new order whose source is the store."""
        self._orders[node] = self._orders.get(node, 0) + 1
        self._bytes += size

    def end(self, node: int, size: int) -> None:
        """Record the end of an order with any result."""
        self._orders[node] -= 1
        if not self._orders[node]:
            del self._orders[node]
        self._bytes -= size

    def succeeded(self) -> None:
        """Raise the limit by one reader, up to the configured maximum."""
        self._allowed = min(self._allowed + 1.0, float(self._readers_max))
        self._pause_s = _STORE_PAUSE_S

    def failed(self, now_s: float) -> None:
        """Halve the number of readers, and pause before the next order."""
        if now_s < self._paused_until_s:
            return  # many nodes may report the same outage, which counts only once
        self._allowed = max(self._allowed / 2.0, 1.0)
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * 2.0, _STORE_PAUSE_MAX_S)
