"""Orders the waiting requests of one tenant in one tier.

First come requests that return (a replica was lost, or they were preempted), then overdue ones, by
the time when they became so, then the rest by `order_key`.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from router.core.types.account import ServiceAccount, TierTotals
from router.core.types.request import Request

_LATE_FACTOR = 1.2
# Dead heap entries are swept when there are more than this and than live ones, or nothing but them:
# they keep their requests, and tenants without any are kept for long.
_SLACK = 64


def order_key(request: Request) -> float:
    """Rank a request among those of its tenant that are not overdue; the least goes first.

    Shortest uncached prompt first keeps the mean TTFT low; `Request.overdue_at` bounds its cost for
    long prompts. A request that cannot meet its objective any more makes way for slightly longer
    ones that still can. The key must not change while the request waits, except by
    `FairQueue.reprice` and at `late_at`.
    """
    tokens = request.uncached_tokens
    return tokens * _LATE_FACTOR if request.is_late else tokens


class Sizes:
    """Numbers of waiting requests by uncached size, in four classes per doubling."""

    __slots__ = ("_classes", "requests", "tokens")

    def __init__(self) -> None:
        self._classes: dict[int, list[int]] = {}  # class -> requests, tokens
        self.requests = 0
        self.tokens = 0

    def add(self, tokens: int, count: int) -> None:
        """Add (`count` 1) or take away (-1) a request."""
        size = _class_of(tokens)
        entry = self._classes.get(size)
        if entry is None:
            entry = self._classes[size] = [0, 0]
        entry[0] += count
        entry[1] += count * tokens
        self.requests += count
        self.tokens += count * tokens
        if not entry[0]:
            del self._classes[size]

    def below(self, tokens: int) -> tuple[float, float]:
        """Return the approximate number of requests, and of their tokens, of at most `tokens`."""
        last = _class_of(tokens)
        requests = total = 0.0
        for size, entry in self._classes.items():
            if size <= last:
                part = 1.0 if size < last else 0.5
                requests += part * entry[0]
                total += part * entry[1]
        return requests, total


def _class_of(tokens: int) -> int:
    bits = tokens.bit_length()
    if bits < 3:
        return tokens
    return bits << 2 | (tokens >> (bits - 3) & 3)


class _Entry:
    """A waiting request with the figures of its rank, which the request's own may differ from."""

    __slots__ = ("request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.uncached_tokens

    def __lt__(self, other: "_Entry") -> bool:
        """Order two entries of one request at one price arbitrarily; the older one is dead."""
        return False


class TenantQueue(ServiceAccount):
    """The waiting requests of one tenant in one tier, beside the tenant's account.

    Attributes:
        running: Dispatches that were neither settled nor pushed back.
        requests: Number of waiting requests.
        tokens: Prompt tokens of the waiting requests.
        listing: Number of the tenant's entry in the tier's heap; 0: no entry.
        since: Number of the first report that could tell of the account.
        told: `service` in the last report with the account.
    """

    __slots__ = (
        *("tenant_id", "running", "requests", "tokens", "listing", "since", "told"),
        *("_returned", "_overdue", "_overdue_tokens", "_rest", "_sizes"),
        *("_shortest", "_due", "_late", "_hidden", "_stash"),
    )

    def __init__(self, tenant_id: str, totals: TierTotals) -> None:
        super().__init__(totals)
        self.tenant_id = tenant_id
        self.running = self.requests = self.tokens = self.listing = self.since = 0
        self.told = 0.0
        self._returned: dict[int, _Entry] = {}
        self._overdue: dict[int, _Entry] = {}
        self._overdue_tokens = 0  # uncached, of the returned and the overdue
        self._rest: dict[int, _Entry] = {}  # by arrival
        self._sizes = Sizes()
        self._shortest: list[tuple[float, int, _Entry]] = []
        self._due: list[tuple[float, int]] = []
        self._late: list[tuple[float, int]] = []
        self._hidden: dict[int, None] = {}  # set aside during a look-ahead
        self._stash: list[tuple[float, int, _Entry]] = []  # of these, the heap's entries

    # --- in and out -------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Add a new request."""
        self.requests += 1
        self.tokens += request.prompt_tokens
        self.totals.uncached_tokens += request.uncached_tokens
        self._rank(request)
        if request.overdue_at < float("inf"):
            heappush(self._due, (request.overdue_at, request.order))
        if request.late_at < float("inf"):
            heappush(self._late, (request.late_at, request.order))
        self._sweep()

    def push_front(self, request: Request) -> None:
        """Add a returning request, behind earlier returning ones."""
        self.requests += 1
        self.tokens += request.prompt_tokens
        self.totals.uncached_tokens += request.uncached_tokens
        self._first(self._returned, _Entry(request))

    def remove(self, request: Request) -> None:
        """Remove a waiting request.

        Raises:
            KeyError: The request does not wait here.
        """
        order = request.order
        if order in self._rest:
            entry = self._unrank(order)
        else:
            entry = (self._returned if order in self._returned else self._overdue).pop(order)
            self._overdue_tokens -= entry.tokens
        self.totals.uncached_tokens -= entry.tokens
        self._hidden.pop(order, None)
        self.requests -= 1
        self.tokens -= request.prompt_tokens
        self._sweep()

    def reprice(self, request: Request, uncached_tokens: int) -> None:
        """Rank a request anew after a change of its prediction."""
        order = request.order
        request.uncached_tokens = uncached_tokens
        if order in self._rest:
            entry = self._rest[order]
            self._sizes.add(entry.tokens, -1)
            self._rank(request)  # a new entry in the old one's place
            self._sweep()
        else:
            entry = (self._returned if order in self._returned else self._overdue)[order]
            self._overdue_tokens += uncached_tokens - entry.tokens
        self.totals.uncached_tokens += uncached_tokens - entry.tokens
        entry.tokens = uncached_tokens

    def _rank(self, request: Request) -> None:
        entry = _Entry(request)
        self._rest[request.order] = entry
        self._sizes.add(entry.tokens, 1)
        heappush(self._shortest, (order_key(request), request.order, entry))

    def _unrank(self, order: int) -> _Entry:
        entry = self._rest.pop(order)
        self._sizes.add(entry.tokens, -1)
        return entry

    def _first(self, line: dict[int, _Entry], entry: _Entry) -> None:
        line[entry.request.order] = entry
        self._overdue_tokens += entry.tokens

    def _sweep(self) -> None:
        """Drop dead heap entries when they are the most; costs O(1) per push and removal."""
        live = len(self._rest)
        entries_max = 2 * live + _SLACK if live else 0
        if len(self._shortest) > entries_max:
            self._shortest = [e for e in self._shortest if self._rest.get(e[1]) is e[2]]
            heapify(self._shortest)
        if len(self._due) > entries_max:
            self._due = [entry for entry in self._due if entry[1] in self._rest]
            heapify(self._due)
        if len(self._late) > entries_max:
            self._late = [entry for entry in self._late if entry[1] in self._rest]
            heapify(self._late)

    # --- order ------------------------------------------------------------------------------

    def head(self, now: float) -> Request | None:
        """Return the next request that is not set aside."""
        self._promote(now)
        for line in (self._returned, self._overdue):
            for order, entry in line.items():
                if order not in self._hidden:
                    return entry.request
        heap = self._shortest
        while heap:
            _, order, entry = heap[0]
            if self._rest.get(order) is not entry:
                heappop(heap)
            elif order in self._hidden:
                self._stash.append(heappop(heap))
            else:
                return entry.request
        return None

    def _promote(self, now: float) -> None:
        """Rank late requests anew, and move overdue ones to their own line."""
        late = self._late
        while late and late[0][0] <= now:
            entry = self._rest.get(heappop(late)[1])
            if entry is not None:
                entry.request.is_late = True
                self._sizes.add(entry.tokens, -1)
                self._rank(entry.request)
        due = self._due
        while due and due[0][0] <= now:
            order = heappop(due)[1]
            if order in self._rest:
                self._first(self._overdue, self._unrank(order))

    def hide(self, request: Request) -> None:
        """Set a request aside until `unhide`."""
        self._hidden[request.order] = None

    def unhide(self) -> None:
        """End a look-ahead: all requests return to their places."""
        self._hidden.clear()
        for entry in self._stash:
            if self._rest.get(entry[1]) is entry[2]:
                heappush(self._shortest, entry)
        self._stash.clear()

    @property
    def has_candidate(self) -> bool:
        """Whether a request waits that is not set aside."""
        return self.requests > len(self._hidden)

    def before(self, uncached_tokens: int, now: float) -> tuple[float, float]:
        """Return the approximate requests and uncached tokens before a new request of this size."""
        self._promote(now)
        requests, tokens = self._sizes.below(uncached_tokens)
        first = len(self._returned) + len(self._overdue)
        return requests + first, tokens + self._overdue_tokens

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens of all waiting requests that have to be computed."""
        return self._sizes.tokens + self._overdue_tokens

    def last(self) -> Request:
        """Return the request to shed first: the youngest; returning ones only at the end.

        Raises:
            StopIteration: The queue is empty.
        """
        line = self._rest or self._overdue or self._returned
        return line[next(reversed(line))].request

    def waiting(self) -> Iterator[Request]:
        """Yield all requests, in no particular order."""
        for line in (self._returned, self._overdue, self._rest):
            for entry in line.values():
                yield entry.request
