"""What the core keeps of requests that do not wait any more: no more than of those that do."""

import gc
from itertools import count

from router.core.queue.adapter_waiters import AdapterWaiters
from router.core.queue.fair_queue import FairQueue
from router.core.types.request import Request, RequestState
from sluice.wire.engine.v1 import engine_pb2 as engine

KEPT_MAX = 200


def kept() -> int:
    """Return how many requests there are, of this test: none of another one is of use."""
    gc.collect()
    return sum(isinstance(it, Request) for it in gc.get_objects())


def test_requests_that_come_in_crowds_and_end_are_not_kept(bench):
    world, keys = bench(replicas=1, sequences=64, step=4096, blocks=4096), count()
    before = kept()
    for _ in range(25):
        for _ in range(20):  # more than are priced anew at a time
            world.submit(hashes=[next(keys)], prompt=32, tick=False)
        world.tick(0.02)
        dispatches = world.sent.pop("replica-0")
        ends = dict.fromkeys(dispatches, engine.FINISH_REASON_LENGTH)
        world.frame(
            "replica-0", admitted=dispatches, tokens={it: [1] for it in dispatches}, finished=ends
        )
        del dispatches, ends
    assert world.core.live_requests == 0
    assert kept() - before < KEPT_MAX


def test_adapters_without_waiting_requests_take_no_room():
    waiters, before = AdapterWaiters(), kept()
    for number in range(2000):
        request = Request(handle=1, cell_id="", prompt_tokens=1, adapter=f"adapter-{number}")
        waiters.add(request, waiting=1)
        request.state = RequestState.RUNNING
    assert kept() - before < KEPT_MAX


def test_a_long_waiting_request_keeps_no_later_one():
    waiters, before = AdapterWaiters(), kept()
    patient = Request(handle=1, cell_id="", prompt_tokens=1, adapter="adapter")
    waiters.add(patient, waiting=1)
    last = patient
    for _ in range(2000):
        request = Request(handle=1, cell_id="", prompt_tokens=1, adapter="adapter")
        waiters.add(request, waiting=3)
        if last is not patient:
            last.state = RequestState.RUNNING
        last = request
    assert kept() - before < KEPT_MAX


def test_a_tenant_keeps_no_request_that_left_its_line():
    queue, before = FairQueue(), kept()
    for tenant in range(20):
        crowd = [
            Request(handle=1, cell_id="", prompt_tokens=1 + size, tenant_id=f"tenant-{tenant}")
            for size in range(200)
        ]
        for order, request in enumerate(crowd):
            request.order = order
            queue.push(request, 0.0)
        for request in reversed(crowd):  # evicted, or cancelled: none was ever the next
            queue.remove(request)
        del crowd, request
    assert kept() - before < KEPT_MAX
