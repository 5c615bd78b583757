"""The fair queue against a naive model that sorts everything every time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fair_queue import FairQueue
from router.core.model import Gateway, Request
from sluice.wire.router.v1 import router_pb2 as wire


class Naive:
    """Counters and lines as plain dicts and lists."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[Request]] = {}
        self.retries: list[Request] = []
        self.counters: dict[tuple[int, str], float] = {}
        self.floors: dict[int, float] = {}

    def push(self, request: Request) -> None:
        key = (request.priority, request.tenant_id)
        floor = self.floors.get(request.priority, 0.0)
        counter = self.counters.setdefault(key, floor)
        if not self.lines.get(key):
            active = [
                self.counters[other]
                for other, line in self.lines.items()
                if line and other[0] == request.priority
            ]
            self.counters[key] = max(counter, min(active, default=floor))
        self.lines.setdefault(key, []).append(request)

    def candidates(self) -> list[Request]:
        """Everything that may be next: ties between tenants are the queue's to break."""
        waiting = [*self.retries, *(line[0] for line in self.lines.values() if line)]
        if not waiting:
            return []
        top = max(request.priority for request in waiting)
        retries = [request for request in self.retries if request.priority == top]
        if retries:
            return retries[:1]
        heads = [line[0] for key, line in self.lines.items() if line and key[0] == top]
        least = min(self.counters[top, request.tenant_id] for request in heads)
        return [r for r in heads if self.counters[top, r.tenant_id] == least]

    def take(self, request: Request) -> None:
        if request in self.retries:
            self.retries.remove(request)
            return
        key = (request.priority, request.tenant_id)
        self.lines[key].remove(request)
        self.floors[key[0]] = max(self.floors.get(key[0], 0.0), self.counters[key])
        self.counters[key] += request.prompt_tokens / request.weight

    def remove(self, request: Request) -> None:
        for line in (self.retries, *self.lines.values()):
            if request in line:
                line.remove(request)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "take", "take", "back", "remove", "charge"]),
        st.integers(0, 2),
        st.sampled_from("abcd"),
        st.integers(1, 50),
    ),
    max_size=80,
)


@settings(deadline=None)  # machines are busy at times
@given(OPERATIONS)
def test_the_queue_serves_as_the_naive_model_does(operations):
    queue, naive = FairQueue(), Naive()
    gateway = Gateway(1)
    taken: list[Request] = []
    weights = {"a": 1, "b": 2, "c": 3, "d": 1}
    for order, (name, priority, tenant, size) in enumerate(operations):
        head = queue.peek()
        candidates = naive.candidates()
        assert (head in candidates) if head is not None else not candidates
        if name == "push":
            submit = wire.Submit(
                tier_priority=priority,
                tenant_id=tenant,
                tenant_weight=weights[tenant],
                prompt=[0] * size,
            )
            request = Request(gateway, submit, order=order, now=0.0, deadline_s=1.0)
            queue.push(request)
            naive.push(request)
        elif name == "take" and head is not None:
            queue.take(head)
            naive.take(head)
            taken.append(head)
        elif name == "back" and taken:
            request = taken.pop(size % len(taken))
            queue.push_front(request)
            naive.retries.append(request)
        elif name == "remove" and (waiting := queue.waiting()):
            request = waiting[size % len(waiting)]
            queue.remove(request)
            naive.remove(request)
        elif name == "charge" and taken:  # output tokens of a running request
            request = taken[size % len(taken)]
            entry = queue._tiers[request.priority].tenants[request.tenant_id]
            entry.counter += size
            naive.counters[request.priority, request.tenant_id] += size
        assert queue.requests == len(queue.waiting())
        assert queue.tokens == sum(request.prompt_tokens for request in queue.waiting())
