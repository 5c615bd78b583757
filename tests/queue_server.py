"""A cell whose engines are a number of places: for tests of the queue alone."""

import random
from itertools import count

from router.core.queue.fair_queue import FairQueue
from router.core.types.request import Dispatch, Request

STEP_S = 0.02


def make(order: int, tenant: str = "a", prompt: int = 100, **words) -> Request:
    overdue_at = words.pop("overdue_at", float("inf"))
    request = Request(handle=order, cell_id="cell", prompt_tokens=prompt, tenant_id=tenant, **words)
    request.order = order
    request.overdue_at = overdue_at
    return request


class Server:
    """A cell with room for so many sequences; each gives one token per step."""

    def __init__(self, room: int, *, seed: int = 0) -> None:
        self.queue = FairQueue()
        self.room = room
        self.now = 0.0
        self.random = random.Random(seed)
        self.orders = count(1)
        self.running: dict[Dispatch, int] = {}  # output tokens to come
        self.service: dict[tuple[int, str], float] = {}  # by priority and tenant
        self.taken: list[Request] = []

    def push(self, tenant: str, prompt: int, **words) -> Request:
        request = make(next(self.orders), tenant, prompt, **words)
        self.queue.push(request, self.now)
        return request

    def step(self, output: int = 50) -> None:
        self.now += STEP_S
        for dispatch in list(self.running):
            dispatch.emitted += 1
            dispatch.account.counter += dispatch.charge
            dispatch.account.totals.served += 2
            self._serve(dispatch, 2)
            self.running[dispatch] -= 1
            if not self.running[dispatch]:
                del self.running[dispatch]
                self.queue.settle(dispatch)
        while len(self.running) < self.room:
            request = self.queue.peek(self.now)
            if request is None:
                break
            tenant = self.queue.take(request, self.now)
            self.taken.append(request)
            dispatch = Dispatch(request, tenant, "r", sequence=request.order, now=self.now)
            dispatch.is_placed = True
            self.running[dispatch] = 1 + int(self.random.random() * 2 * output)
            self._serve(dispatch, request.prompt_tokens)

    def _serve(self, dispatch: Dispatch, service: float) -> None:
        key = (dispatch.request.priority, dispatch.request.tenant_id)
        self.service[key] = self.service.get(key, 0.0) + service
