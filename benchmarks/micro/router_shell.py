"""Measures the router's CPU time per engine frame: shell, core and the tick after the frame.

One operation handles a Triton response with one step frame (one token per row). The response's
bytes pass through `read_response`, the hub and the core. The operation includes one tick of the
loop, and ends with the bytes for the gateway. There are one replica and one gateway. `waiting` is
the number of prompts that wait in the engine meanwhile, as after a burst. Each frame is followed by
a tick and a message of its own, so no work of several frames is merged. `steps` measures the merged
case, in which each of many replicas sends a frame of eight rows within a millisecond. `us_per_step`
is the time for all these frames, their ticks and the one message to the gateway. Figures are CPU
time of one core in the best of 30 parts of the run, because other work disturbs that part least.
Not measured: gRPC and sockets.
Run: `python -m benchmarks.micro.router_shell`.
"""

import asyncio
import gc
import time
from typing import Any

import uvloop

from benchmarks.results import write_result
from router import hub as hubs
from router import outgoing
from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.hub import Hub
from router.metrics import RouterMetrics
from router.outgoing import HostOutbox
from sluice.kserve import read_response
from sluice.triton import messages
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

CELL, REPLICA, EPOCH = "cell", "replica", 1
LIMITS = EngineLimits(1 << 20, 512, 8192, 1 << 20, 32)
FRAMES = 6000
PARTS = 30
STEPS = 20  # steps in one part of the run
_PAUSE_S = outgoing.PAUSE_S


async def dispatched(hub: Hub, outbox: HostOutbox, rows: int) -> list[int]:
    """Submit requests, wait until all are dispatched, and return their sequences."""
    sequences: list[int] = []
    for _ in range(100 * rows):
        hub.tick()
        sequences += [entry.id for message in outbox.take() for entry in message.submit.sequences]
        if len(sequences) == rows:
            return sequences
        idle = engine.EngineState(running=len(sequences), step_us=1000)
        hub.frame(REPLICA, EPOCH, engine.StepFrame(steps=1, state=idle))
        await asyncio.sleep(0.001)
    raise AssertionError("the core does not dispatch")


def response(sequences: list[int], waiting: int, step: int) -> bytes:
    """Return Triton's response for a step, during which `waiting` prompts wait."""
    rows = len(sequences)
    frame = engine.StepFrame(
        step=step,
        steps=1,
        sequence=sequences,
        count=[1] * rows,
        token=[(step * 7 + row) % 50_000 for row in range(rows)],
        state=engine.EngineState(
            running=rows, waiting=waiting, step_us=10_000, kv_blocks_used=3 * rows
        ),
    )
    message = messages.ModelStreamInferResponse()
    message.infer_response.id = "attach"
    message.infer_response.model_name = "llm"
    message.infer_response.raw_output_contents.append(
        engine.HostFrame(step=frame).SerializeToString()
    )
    return message.SerializeToString()


async def per_frame(rows: int, waiting: int) -> dict[str, Any]:
    """Return the CPU time of a frame with `rows` rows, while `waiting` prompts wait."""
    hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
    hub.plan([CELL], [ReplicaPlan(REPLICA, CELL)])
    link = hub.connect("gateway")
    outbox = HostOutbox(EPOCH)
    hub.attached(REPLICA, outbox, LIMITS)
    submits = [
        wire.Submit(handle=row + 1, cell_id=CELL, prompt=[1] * 20, output_tokens_max=1 << 19)
        for row in range(rows + waiting)
    ]
    hub.request(link, wire.ConnectRequest(submits=submits))
    sequences = await dispatched(hub, outbox, rows + waiting)
    frames = [response(sequences[:rows], waiting, step) for step in range(FRAMES)]
    best_s = float("inf")
    size = FRAMES // PARTS
    for first in range(0, FRAMES, size):
        started_s = time.process_time()
        for data in frames[first : first + size]:
            message = messages.ModelStreamInferResponse.FromString(data)
            _, frame, _, _ = read_response(message)
            assert frame is not None
            hub.frame(REPLICA, EPOCH, frame.step)
            await asyncio.sleep(0)  # the tick
            assert link.take() is not None
        best_s = min(best_s, (time.process_time() - started_s) / size)
    hub.close()
    return {
        "rows": rows,
        "waiting": waiting,
        "us_per_frame": round(1e6 * best_s, 1),
        "us_per_token": round(1e6 * best_s / rows, 2),
    }


async def per_step(replicas: int, rows: int = 8) -> dict[str, Any]:
    """Return the CPU time of a step of several replicas, whose frames arrive one by one."""
    hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
    outboxes = {f"replica-{it}": HostOutbox(it + 1) for it in range(replicas)}
    hub.plan([CELL], [ReplicaPlan(name, CELL) for name in outboxes])
    link = hub.connect("gateway")
    for name, outbox in outboxes.items():
        hub.attached(name, outbox, LIMITS)
    prompt, handles = [1] * 20, range(1, replicas * rows + 1)
    submits = [
        wire.Submit(handle=it, cell_id=CELL, prompt=prompt, output_tokens_max=1 << 19)
        for it in handles
    ]
    hub.request(link, wire.ConnectRequest(submits=submits))
    sequences: dict[str, list[int]] = {name: [] for name in outboxes}
    while sum(map(len, sequences.values())) < len(handles):
        hub.tick()
        for name, outbox in outboxes.items():
            sent = [it.id for message in outbox.take() for it in message.submit.sequences]
            sequences[name] += sent
            idle = engine.EngineState(running=len(sequences[name]), step_us=1000)
            hub.frame(name, outbox.epoch, engine.StepFrame(steps=1, state=idle))
        await asyncio.sleep(0.001)
    best_s = float("inf")
    for _ in range(PARTS):
        started_s = time.process_time()
        for step in range(STEPS):
            for name, outbox in outboxes.items():
                running = sequences[name]
                hub.frame(name, outbox.epoch, _frame(running, step))
                await asyncio.sleep(0)  # each frame arrives on a separate socket
            await asyncio.sleep(2 * _PAUSE_S)
            while link.take() is None:  # noqa: ASYNC110 - the link has no event
                await asyncio.sleep(_PAUSE_S)  # a busy machine may be late
        best_s = min(best_s, (time.process_time() - started_s) / STEPS)
    hub.close()
    return {"replicas": replicas, "rows": rows, "us_per_step": round(1e6 * best_s, 1)}


def _frame(sequences: list[int], step: int) -> engine.StepFrame:
    rows = len(sequences)
    state = engine.EngineState(running=rows, step_us=20_000)
    return engine.StepFrame(
        step=step, steps=1, sequence=sequences, count=[1] * rows, token=[7] * rows, state=state
    )


def main() -> None:
    """Measure, print and write the result."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    steps = [uvloop.run(per_step(replicas)) for replicas in (1, 4, 16)]
    outgoing.PAUSE_S = hubs.PASS_S = 0.0
    cases = ((8, 0), (64, 0), (256, 0), (64, 100))
    figures = [uvloop.run(per_frame(*case)) for case in cases]
    path = write_result("router_shell", __doc__ or "", {"frames": figures, "steps": steps})
    for row in (*figures, *steps):
        print(row)
    print(path)


if __name__ == "__main__":
    main()
