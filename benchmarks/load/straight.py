"""A closed-loop client attached directly to a Triton, to measure it without gateway and router.

One operation is one sequence. The number of concurrent sequences is that of the streams of a
`StreamLoad`, and they begin over the same ramp. When a sequence ends, the client submits a new one.
A token's arrival is the time when this process has read the token's frame.
"""

import asyncio
import time
from array import array
from typing import Any

import httpx

from benchmarks.load.replica import Attached, prompt
from benchmarks.load.sse_client import StreamLoad
from benchmarks.load.stack import BenchmarkStack
from sluice.kserve import HostStream

_PROMPT_TOKENS = 30  # about the length of a `StreamLoad`'s prompt
_SILENCE_S = 10.0


async def replica_of(stack: BenchmarkStack) -> dict[str, Any]:
    """Return the control plane's entry of the stack's first replica."""
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    async with httpx.AsyncClient(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers) as admin:
        return (await admin.get("/v1/replicas")).json()["data"][0]


async def straight_arrivals(stack: BenchmarkStack, load: StreamLoad) -> "list[array[float]]":
    """Return the arrival times of each sequence's tokens, in seconds of the monotonic clock."""
    replica = await replica_of(stack)
    arrivals: list[array[float]] = []
    address, model = replica["grpc_address"], replica["triton_model"]
    async with (
        asyncio.timeout(load.limit_s),
        HostStream(address, model, silence_s=_SILENCE_S) as stream,
    ):
        await stream.open(timeout_s=_SILENCE_S)
        attached = Attached(stream)
        await attached.attach()

        async def begin() -> None:
            arrivals.append(array("d"))
            await attached.submit([prompt(_PROMPT_TOKENS)], load.max_tokens)

        async def read() -> None:
            finished = 0
            while finished < load.requests:
                step = await attached.next_step()
                now_s = time.monotonic()
                for sequence, count in zip(step.sequence, step.count, strict=True):
                    arrivals[sequence].extend([now_s] * count)
                for _ in step.finished:
                    finished += 1
                    if len(arrivals) < load.requests:
                        await begin()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for _ in range(load.streams):
                await begin()
                await asyncio.sleep(load.ramp_s / load.streams)
    return arrivals
