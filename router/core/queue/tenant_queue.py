"""Orders the waiting requests of one tenant in one tier.

Returning requests, whose replica was lost or which were preempted, are served first. Overdue
requests follow in the order in which they became overdue, then all other requests by `order_key`.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from router.core.types.account import ServiceAccount, TierTotals
from router.core.types.request import Request

_LATE_FACTOR = 1.2
# Dead heap entries are removed when they outnumber the live entries by more than this number, or
# when no live entry is left. Dead entries occupy memory with their requests, and a tenant's queue
# exists for a long time after its last request.
_SLACK = 64


def order_key(request: Request) -> float:
    """Return the sort key of a request among its tenant's requests that are not overdue.

    The shortest uncached prompt is served first, which keeps the mean TTFT low. The wait of long
    prompts is bounded by `Request.overdue_at`. A request that must miss its objective is served
    after slightly longer requests that can still meet theirs. The key must not change while the
    request waits, except by `FairQueue.reprice` and at `late_at`.
    """
    tokens = request.uncached_tokens
    return tokens * _LATE_FACTOR if request.is_late else tokens


class Sizes:
    """A histogram of waiting requests by uncached tokens, with four classes per doubling."""

    __slots__ = ("_classes", "requests", "tokens")

    def __init__(self) -> None:
        self._classes: dict[int, list[int]] = {}  # [requests, tokens] by class
        self.requests = 0
        self.tokens = 0

    def add(self, tokens: int, count: int) -> None:
        """Add a request (`count` is 1), or remove a request (`count` is -1)."""
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
        """Return about how many requests have at most `tokens`, and the sum of their tokens."""
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
    """A waiting request with the figures of its last ranking. The figures may be out of date."""

    __slots__ = ("request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.uncached_tokens

    def __lt__(self, other: "_Entry") -> bool:
        """Return an arbitrary order for two entries of one request, since the older one is dead."""
        return False


class TenantQueue(ServiceAccount):
    """The waiting requests and the service account of one tenant in one tier.

    Attributes:
        running: Number of dispatches that were neither settled nor queued again.
        requests: Number of waiting requests.
        tokens: Prompt tokens of the waiting requests.
        listing: Number of the tenant's entry in the tier's heap, or 0 without an entry.
        since: Number of the first report after the account was opened.
        reported: Value of `service` in the last report that contained the account.
    """

    __slots__ = (
        *("tenant_id", "running", "requests", "tokens", "listing", "since", "reported"),
        *("_returned", "_overdue", "_overdue_tokens", "_rest", "_sizes"),
        *("_shortest", "_due", "_late", "_hidden", "_stash"),
    )

    def __init__(self, tenant_id: str, totals: TierTotals) -> None:
        super().__init__(totals)
        self.tenant_id = tenant_id
        self.running = self.requests = self.tokens = self.listing = self.since = 0
        self.reported = 0.0
        self._returned: dict[int, _Entry] = {}
        self._overdue: dict[int, _Entry] = {}
        self._overdue_tokens = 0  # uncached tokens of returned and overdue requests
        self._rest: dict[int, _Entry] = {}  # other requests by arrival
        self._sizes = Sizes()
        self._shortest: list[tuple[float, int, _Entry]] = []
        self._due: list[tuple[float, int]] = []
        self._late: list[tuple[float, int]] = []
        self._hidden: dict[int, None] = {}  # requests that a look-ahead has skipped
        self._stash: list[tuple[float, int, _Entry]] = []  # heap entries of hidden requests

    # --- arrivals and removals --------------------------------------------------------------

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
        """Add a returning request, behind requests that returned earlier."""
        self.requests += 1
        self.tokens += request.prompt_tokens
        self.totals.uncached_tokens += request.uncached_tokens
        self._first(self._returned, _Entry(request))

    def remove(self, request: Request) -> None:
        """Remove a waiting request.

        Raises:
            KeyError: The request is not in the queue.
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
        """Set the predicted uncached tokens of a waiting request, and rank the request again."""
        order = request.order
        request.uncached_tokens = uncached_tokens
        if order in self._rest:
            entry = self._rest[order]
            self._sizes.add(entry.tokens, -1)
            self._rank(request)  # replaces the old entry
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
        """Remove dead heap entries if they are the majority, in amortized O(1) per operation."""
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
        """Return the next request that no look-ahead has hidden."""
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
        """Rank requests again after their `late_at`, and move overdue requests to the front."""
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
        """Hide a request from `head` until `unhide`."""
        self._hidden[request.order] = None

    def unhide(self) -> None:
        """End a look-ahead, so that `head` can return all requests again."""
        self._hidden.clear()
        for entry in self._stash:
            if self._rest.get(entry[1]) is entry[2]:
                heappush(self._shortest, entry)
        self._stash.clear()

    @property
    def has_candidate(self) -> bool:
        """Whether a waiting request is not hidden."""
        return self.requests > len(self._hidden)

    def before(self, uncached_tokens: int, now: float) -> tuple[float, float]:
        """Return about how many requests and tokens would precede a new request of this size."""
        self._promote(now)
        requests, tokens = self._sizes.below(uncached_tokens)
        first = len(self._returned) + len(self._overdue)
        return requests + first, tokens + self._overdue_tokens

    @property
    def uncached_tokens(self) -> int:
        """Uncached prompt tokens of all waiting requests."""
        return self._sizes.tokens + self._overdue_tokens

    def last(self) -> Request:
        """Return the latest arrival, to shed first. A returning request is shed last.

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
