"""The fair queue against a naive model that sorts everything every time."""

# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.queue.fair_queue import FairQueue, Tier
from router.core.types.request import Dispatch, Request

PRIORITIES = (0, 5, 9)
TENANTS = "abcd"
WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 1}
RESERVED = {0: 100, 5: 300, 9: 0}


@dataclass
class Line:
    """What the model knows of one tenant in one tier."""

    counter: float
    returned: list[Request] = field(default_factory=list)
    others: list[Request] = field(default_factory=list)

    def ordered(self, now: float) -> list[Request]:
        overdue = sorted(
            (r for r in self.others if r.overdue_at <= now), key=lambda r: (r.overdue_at, r.order)
        )
        rest = [r for r in self.others if r.overdue_at > now]
        rest.sort(key=lambda r: (r.uncached_tokens, r.order))
        return [*self.returned, *overdue, *rest]


class Naive:
    """One tier: counters as plain numbers, lines as plain lists."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.last: str | None = None

    def least(self) -> float | None:
        counters = [line.counter for line in self.lines.values() if line.returned + line.others]
        if counters:
            return min(counters)
        return None if self.last is None else self.lines[self.last].counter

    def push(self, request: Request, *, comes_back: bool, allowance: float) -> None:
        least = self.least()
        line = self.lines.setdefault(request.tenant_id, Line(least or 0.0))
        if not line.returned + line.others and least is not None:
            line.counter = max(line.counter, least - allowance / request.weight)
        (line.returned if comes_back else line.others).append(request)

    def remove(self, request: Request) -> Line:
        line = self.lines[request.tenant_id]
        (line.returned if request in line.returned else line.others).remove(request)
        return line

    def take(self, request: Request, *, pays: bool) -> None:
        line = self.remove(request)
        self.last = request.tenant_id
        if pays:
            line.counter += request.uncached_tokens / request.weight

    def order(self, now: float) -> list[list[Request]]:
        """Return the tenants' lines, the next tenant first."""
        waiting = [(line.counter, line.ordered(now)) for line in self.lines.values()]
        waiting.sort(key=lambda entry: entry[0])
        return [requests for _, requests in waiting if requests]

    def is_next(self, tenant_id: str) -> bool:
        least = self.least()
        assert least is not None
        return self.lines[tenant_id].counter <= least + 1e-9


class QueueMachine(RuleBasedStateMachine):
    """Random pushes, takes, tokens, ends and returns, on both."""

    @initialize()
    def start(self) -> None:
        self.queue = FairQueue()
        self.naive = {priority: Naive() for priority in PRIORITIES}
        self.now = 0.0
        self.orders = 0
        self.running: list[Dispatch] = []
        self.paid: dict[int, int] = {}  # by request: prompt tokens
        self.emitted = dict.fromkeys(((p, t) for p in PRIORITIES for t in TENANTS), 0)

    def tier(self, priority: int) -> Tier:
        return self.queue._tiers[priority]

    def allowance(self, request: Request) -> float:
        return self.tier(request.priority).return_allowance

    def runs(self, request: Request) -> bool:
        key = (request.priority, request.tenant_id)
        return key in [(s.request.priority, s.request.tenant_id) for s in self.running]

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def time_goes_on(self, seconds: Any) -> None:
        self.now += seconds

    @rule(
        priority=st.sampled_from(PRIORITIES),
        tenant=st.sampled_from(TENANTS),
        size=st.integers(1, 50),
        patience_s=st.sampled_from([0.5, 5.0, float("inf")]),
    )
    def push(self, priority: Any, tenant: Any, size: Any, patience_s: Any) -> None:
        self.orders += 1
        request = Request(
            handle=self.orders,
            cell_id="cell",
            prompt_tokens=size,
            tenant_id=tenant,
            priority=priority,
            weight=WEIGHTS[tenant],
            reserved_permille=RESERVED[priority],
            is_preemptible=priority == PRIORITIES[0],
        )
        request.order = self.orders
        request.overdue_at = self.now + patience_s
        allowance = self.allowance(request) if self.runs(request) else 0.0
        self.queue.push(request, self.now)
        self.naive[priority].push(request, comes_back=False, allowance=allowance)

    @rule(skips=st.integers(0, 3))
    def take(self, skips: Any) -> None:
        request = self.queue.peek(self.now)
        for _ in range(skips):
            following = None if request is None else self.queue.skip(request)
            if following is None:
                break
            request = following
        if request is None:
            assert not self.queue.requests
            return
        pays = not request.is_charged
        tenant = self.queue.take(request, self.now)
        self.naive[request.priority].take(request, pays=pays)
        self.paid.setdefault(request.order, request.uncached_tokens)
        assert tenant.tenant_id == request.tenant_id
        dispatch = Dispatch(request, tenant, "replica", sequence=self.orders, now=self.now)
        dispatch.cached_tokens = request.prompt_tokens - request.uncached_tokens
        request.dispatch = dispatch
        self.running.append(dispatch)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), tokens=st.integers(1, 30))
    def tokens(self, number: Any, tokens: Any) -> None:
        dispatch = self.running[number % len(self.running)]
        dispatch.emitted += tokens
        dispatch.is_placed = True
        dispatch.account.counter += dispatch.charge * tokens
        key = (dispatch.request.priority, dispatch.request.tenant_id)
        self.emitted[key] += tokens
        self.naive[key[0]].lines[key[1]].counter += 2.0 * tokens / dispatch.request.weight

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def lose(self, number: Any) -> None:
        dispatch = self.running.pop(number % len(self.running))
        dispatch.request.attempts += 1
        allowance = self.allowance(dispatch.request)
        self.queue.push_front(dispatch.request, self.now)
        self.naive[dispatch.request.priority].push(
            dispatch.request, comes_back=True, allowance=allowance
        )

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), cached=st.integers(0, 50))
    def finish(self, number: Any, cached: Any) -> None:
        dispatch = self.running.pop(number % len(self.running))
        request = dispatch.request
        dispatch.cached_tokens = min(cached, request.prompt_tokens - 1)
        self.queue.settle(dispatch)
        if not request.attempts:
            has_run = dispatch.is_placed or dispatch.emitted
            self._pay(request, request.prompt_tokens - dispatch.cached_tokens if has_run else 0)

    def _pay(self, request: Request, computed: int) -> None:
        line = self.naive[request.priority].lines[request.tenant_id]
        line.counter += (computed - self.paid[request.order]) / request.weight
        self.paid[request.order] = computed

    @precondition(lambda self: self.queue.requests)
    @rule(number=st.integers(0, 99), size=st.integers(1, 50))
    def reprice(self, number: Any, size: Any) -> None:
        waiting = self.queue.waiting()
        request = waiting[number % len(waiting)]
        self.queue.reprice(request, min(size, request.prompt_tokens))

    @precondition(lambda self: self.queue.requests)
    @rule(number=st.integers(0, 99))
    def remove(self, number: Any) -> None:
        waiting = self.queue.waiting()
        request = waiting[number % len(waiting)]
        self.queue.remove(request)
        self.naive[request.priority].remove(request)
        if request.is_charged:
            if request.output:
                return
            self._pay(request, 0)

    @precondition(lambda self: self.queue.requests)
    @rule(priority=st.sampled_from([1, 6, 10]))
    def shed(self, priority: Any) -> None:
        victim = self.queue.cheapest_to_lose(priority, self.now)
        lower = [p for p in PRIORITIES if p < priority and self.naive[p].order(self.now)]
        if not lower:
            assert victim is None
            return
        assert victim is not None
        assert victim.priority == min(lower)
        self.queue.remove(victim)
        self.naive[victim.priority].remove(victim)
        if victim.is_charged and not victim.output:
            self._pay(victim, 0)

    @rule()
    def look_ahead_sees_everything_once_in_order(self) -> None:
        seen: list[Request] = []
        request = self.queue.peek(self.now)
        while request is not None:
            seen.append(request)
            request = self.queue.skip(request)
        assert sorted(r.order for r in seen) == [r.order for r in self.queue.waiting()]
        for priority in PRIORITIES:
            lines = self.naive[priority].order(self.now)
            for line in lines:
                mine = [r for r in seen if r.priority == priority and r in line]
                assert mine == line
            heads = [r for r in seen if r.priority == priority][: len(lines)]
            assert {r.tenant_id for r in heads} == {line[0].tenant_id for line in lines}

    @invariant()
    def the_head_is_the_model_s(self) -> None:
        head = self.queue.peek(self.now)
        lines = {p: self.naive[p].order(self.now) for p in PRIORITIES}
        waiting = [p for p in PRIORITIES if lines[p]]
        if head is None:
            assert not waiting
            return
        if head.priority != max(waiting):  # only by what it is owed
            tier = self.tier(head.priority)
            assert tier.balance >= tier.cost(head) > 0.0
        assert self.naive[head.priority].is_next(head.tenant_id)
        assert head is next(line for line in lines[head.priority] if head in line)[0]

    @invariant()
    def nothing_is_lost_and_the_totals_are_true(self) -> None:
        waiting = self.queue.waiting()
        model = [r for n in self.naive.values() for line in n.order(self.now) for r in line]
        assert [r.order for r in waiting] == sorted(r.order for r in model)
        assert self.queue.requests == len(waiting)
        assert self.queue.tokens == sum(r.prompt_tokens for r in waiting)
        for priority in PRIORITIES:
            mine = [r for r in waiting if r.priority == priority]
            if priority in self.queue._tiers:
                tier = self.tier(priority)
                assert (tier.requests, tier.tokens) == (
                    len(mine),
                    sum(r.prompt_tokens for r in mine),
                )
                assert tier.totals.uncached_tokens == sum(r.uncached_tokens for r in mine)
            for tenant in TENANTS:
                own = [r for r in mine if r.tenant_id == tenant]
                load = (len(own), sum(r.prompt_tokens for r in own))
                assert self.queue.tenant_load(priority, tenant) == load

    @invariant()
    def a_prompt_is_paid_once(self) -> None:
        for priority, naive in self.naive.items():
            for tenant_id, line in naive.lines.items():
                tenant = self.tier(priority)._tenants[tenant_id]
                assert abs(tenant.counter - line.counter) < 1e-6
        for dispatch in self.running:
            assert dispatch.request.charged_tokens == self.paid[dispatch.request.order]

    @precondition(lambda self: self.queue.requests)
    @rule(priority=st.sampled_from(PRIORITIES), size=st.integers(1, 50))
    def estimates_stay_within_what_waits(self, priority: Any, size: Any) -> None:
        requests, tokens = self.queue.ahead(priority, "a", 1, size, self.now)
        assert 0 <= requests <= self.queue.requests
        assert 0 <= tokens <= sum(r.uncached_tokens for r in self.queue.waiting())


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    # machines are busy at times
    suppress_health_check=[HealthCheck.too_slow],
)
