"""CPU of the router's shell and core per frame of an engine, with its tick.

One operation: a Triton response with one step frame (one token per row) from bytes through
`read_response`, the hub and the core, one tick of the loop, and the gateway's bytes. One replica,
one gateway; `waiting`: so many prompts wait in the engine meanwhile, as after a burst. Frames come
faster here than from any engine, so messages to the gateway do not wait for each other. Not
measured: gRPC and sockets. The figure is that of the best of 30 parts of the run, which a busy
machine disturbs least; CPU time of one core.
Run: `python -m benchmarks.micro.router_shell`.
"""

import asyncio
import gc
import time
from typing import Any

import uvloop

from benchmarks.results import write_result
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


async def dispatched(hub: Hub, outbox: HostOutbox, rows: int) -> list[int]:
    """Submit requests; return their sequences once the replica has been sent all of them."""
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
    """Return what Triton sends for a step while so many others wait."""
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
    """Return the CPU of a frame with so many rows, while so many prompts wait."""
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


def main() -> None:
    """Measure, print and record."""
    outgoing.PAUSE_S = 0.0
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    cases = ((8, 0), (64, 0), (256, 0), (64, 100))
    figures = [uvloop.run(per_frame(*case)) for case in cases]
    path = write_result("router_shell", __doc__ or "", {"frames": figures})
    for row in figures:
        print(row)
    print(path)


if __name__ == "__main__":
    main()
