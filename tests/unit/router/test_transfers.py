"""Carrying blocks between hosts: in order, in slices, and never longer than allowed."""

import asyncio

import pytest

from router.core.types.account import ServiceAccount, TierTotals
from router.core.types.actions import Transfer
from router.core.types.request import Dispatch, Request
from router.fleet import Target
from router.transfers import Transfers
from sluice.errors import ErrorCode, FailedError
from sluice.hashing import HASH_BYTES
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

pytestmark = pytest.mark.asyncio
BLOCK_BYTES = 1 << 20  # four in one message


class Host:
    """A host with some blocks, behind streams that count what is open."""

    def __init__(self, blocks: int = 0, *, room: int = 1 << 30) -> None:
        self.cached = [bytes([number]) * HASH_BYTES for number in range(1, blocks + 1)]
        self.room = room
        self.open = 0
        self.largest = 0
        self.is_refusing = self.is_silent = self.is_down = False

    def answer(self, request: engine.HostRequest) -> engine.HostFrame:
        if self.is_refusing:
            return engine.HostFrame(refused=engine.Refused(code="engine_busy", message="busy"))
        if request.HasField("export_kv"):
            data = request.export_kv.hashes
            wanted = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
            found = [entry for entry in wanted if entry in self.cached]
            self.largest = max(self.largest, len(found))
            blocks = engine.KvBlocks(hashes=b"".join(found), block_bytes=BLOCK_BYTES)
            return engine.HostFrame(exported=blocks)
        data = request.import_kv.blocks.hashes
        given = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
        taken = given[: max(0, self.room - len(self.cached))]
        self.cached += taken
        return engine.HostFrame(imported=engine.Imported(blocks=len(taken)))


class Stream:
    """A stream to a host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answers: asyncio.Queue[engine.HostFrame] = asyncio.Queue()
        self.is_open = False

    async def open(self, *, timeout_s: float, is_patient: bool) -> None:
        if self.host.is_down:
            raise FailedError(ErrorCode.UNAVAILABLE, "refused")
        self.is_open = True
        self.host.open += 1

    async def send(self, request: engine.HostRequest) -> None:
        if not self.host.is_silent:
            self.answers.put_nowait(self.host.answer(request))

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        return await self.answers.get()

    async def close(self, *, timeout_s: float) -> None:
        self.host.open -= self.is_open
        self.is_open = False


def transfer(blocks: int, *, first=0, deadline_s=5.0) -> Transfer:
    hashes = b"".join(bytes([number]) * HASH_BYTES for number in range(1, first + blocks + 1))
    request = Request(handle=1, cell_id="cell", prompt_tokens=7)
    request.payload = wire.Submit(block_hashes=hashes)
    account = ServiceAccount(TierTotals())
    dispatch = Dispatch(request, account, "target", sequence=7, now=0.0)
    return Transfer(
        dispatch=dispatch, source="source", first=first, blocks=blocks, deadline_s=deadline_s
    )


async def bring(job: Transfer, source: Host, target: Host) -> list[tuple[int, int]]:
    hosts = {"source": source, "target": target}
    done: list[tuple[int, int]] = []
    async with asyncio.TaskGroup() as tasks:
        transfers = Transfers(
            tasks,
            lambda name: Target(name, "llm") if name in hosts else None,
            lambda place: Stream(hosts[place.address]),
            lambda sequence, blocks: done.append((sequence, blocks)),
        )
        transfers.start(job)
    assert source.open == target.open == 0
    return done


async def test_all_blocks_come_in_their_order_in_slices():
    source, target = Host(30), Host()
    assert await bring(transfer(30), source, target) == [(7, 30)]
    assert target.cached == source.cached
    assert source.largest == 4


async def test_blocks_on_the_target_are_not_requested():
    source, target = Host(10), Host(6)
    assert await bring(transfer(4, first=6), source, target) == [(7, 4)]
    assert target.cached == source.cached


@pytest.mark.parametrize(
    ("has", "room", "brought"), [(0, 99, 0), (9, 99, 9), (4, 99, 4), (20, 10, 10), (20, 0, 0)]
)
async def test_a_transfer_ends_with_the_available_blocks(has, room, brought):
    assert await bring(transfer(20), Host(has), Host(room=room)) == [(7, brought)]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("fault", ["is_refusing", "is_silent", "is_down"])
async def test_a_host_that_does_not_play_along_is_no_error(side, fault):
    hosts = {"source": Host(20), "target": Host()}
    setattr(hosts[side], fault, True)
    assert await bring(transfer(20, deadline_s=0.05), **hosts) == [(7, 0)]


async def test_a_replica_or_a_request_that_has_gone_is_told_at_once():
    job = transfer(5)
    job.dispatch.request.payload = None
    assert await bring(job, Host(5), Host()) == [(7, 0)]
    gone = Transfer(dispatch=job.dispatch, source="elsewhere", first=0, blocks=5, deadline_s=1.0)
    assert await bring(gone, Host(5), Host()) == [(7, 0)]
