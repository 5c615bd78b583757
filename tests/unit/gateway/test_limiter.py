"""What a limiter takes it gives back when nobody waits for it any more."""

import asyncio
from typing import cast

import pytest

from gateway.directory import Principal
from gateway.limits.limiter import Limiter
from gateway.limits.valkey import ValkeyClient, ValkeyError
from sluice.wire.control.v1 import control_pb2 as control

PRINCIPAL = Principal(
    control.ApiKey(id="k"), control.Tenant(id="t"), control.Tier(rpm=10, tpm=1000)
)


class Valkey:
    """Keeps calls and their futures; the test answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | int, ...]] = []
        self.replies: list[asyncio.Future[object]] = []

    def call(self, *arguments: str | int) -> asyncio.Future[object]:
        self.calls.append(arguments)
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]


async def reserve(limiter: Limiter, tokens: int) -> None:
    await limiter.reserve(
        PRINCIPAL, "m", prompt_tokens=tokens, output_tokens_max=0, is_bounded=True
    )


@pytest.mark.parametrize(("granted", "calls"), [(1, 2), (0, 1), (None, 1)])
async def test_a_client_that_leaves_while_its_reservation_is_made(
    granted: int | None, calls: int
) -> None:
    valkey = Valkey()
    limiter = Limiter(cast("ValkeyClient", valkey), local_share=0.5, clock=lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter, 300))
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    if granted is None:
        valkey.replies[0].set_exception(ValkeyError("gone"))
    else:
        valkey.replies[0].set_result([granted, 0, 0, 9, 700])
    await asyncio.sleep(0)
    assert len(valkey.calls) == calls
    if granted:
        assert valkey.calls[1][4:7] == (300, 0, 1), "300 reserved, none used, the request back"
