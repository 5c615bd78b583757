"""Copies KV blocks of split requests from one engine host to another.

Transfers use separate streams, so that a slow transfer does not delay frames. Each transfer has a
deadline, and always ends with the number of blocks that arrived, possibly zero. The target engine
computes the missing blocks.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from sluice.errors import ErrorCode, FailedError
from sluice.hashing import HASH_BYTES
from sluice.wire.engine.v1 import engine_pb2 as engine

if TYPE_CHECKING:
    from router.attach import Stream
    from router.core.types.actions import Transfer
    from router.fleet import Target

log = structlog.get_logger(__name__)

AT_ONCE_MAX = 2  # most concurrent transfers, because the bytes pass through this process
# Bytes per message. Larger messages wait for fewer engine steps, but each megabyte blocks the event
# loop for about a millisecond.
_MESSAGE_BYTES = 4 << 20
_FIRST_BLOCKS = 4  # blocks of the first message, while the size of a block is unknown
_CLOSE_TIMEOUT_S = 0.5


class Transfers:
    """The KV transfers of a router, each of which runs as a task."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        target_of: "Callable[[str], Target | None]",
        open_stream: "Callable[[Target], Stream]",
        done: Callable[[int, int], None],
    ) -> None:
        """Create an empty set of transfers.

        Args:
            tasks: TaskGroup of the transfers.
            target_of: Returns the address of a replica, or None for an unknown replica.
            open_stream: Returns an unopened stream to an engine host.
            done: Called once per transfer, with the sequence and the number of blocks that arrived.
        """
        self._tasks = tasks
        self._target_of = target_of
        self._open_stream = open_stream
        self._done = done
        self._places = asyncio.Semaphore(AT_ONCE_MAX)

    def start(self, transfer: "Transfer") -> None:
        """Start a transfer. `done` is called when the transfer ends, or soon after the deadline."""
        dispatch = transfer.dispatch
        source, target = self._target_of(transfer.source), self._target_of(dispatch.replica_id)
        payload = dispatch.request.payload
        if source is None or target is None or payload is None:
            self._done(dispatch.sequence, 0)
            return
        first = transfer.first * HASH_BYTES
        hashes = payload.block_hashes[first : first + transfer.blocks * HASH_BYTES]
        self._tasks.create_task(self._run(transfer, source, target, hashes))

    async def _run(
        self, transfer: "Transfer", source: "Target", target: "Target", hashes: bytes
    ) -> None:
        giver, taker = self._open_stream(source), self._open_stream(target)
        relay = _Relay(hashes)
        reason = ""
        try:
            try:
                async with asyncio.timeout(transfer.deadline_s), self._places:
                    for stream in (giver, taker):
                        await stream.open(timeout_s=transfer.deadline_s, is_patient=False)
                    await relay.run(giver, taker)
            except (FailedError, TimeoutError) as error:
                reason = str(error) or f"not over within {transfer.deadline_s:.2f} s"
            if relay.brought < transfer.blocks:
                log.info(
                    "transfer_incomplete",
                    source=transfer.source,
                    target=transfer.dispatch.replica_id,
                    blocks=transfer.blocks,
                    brought=relay.brought,
                    reason=reason,
                )
            self._done(transfer.dispatch.sequence, relay.brought)
        finally:  # streams are closed even after a failure
            for stream in (giver, taker):
                await stream.close(timeout_s=_CLOSE_TIMEOUT_S)


class _Relay:
    """A transfer over two open streams.

    Attributes:
        brought: Number of leading blocks that have arrived.
    """

    def __init__(self, hashes: bytes) -> None:
        self._hashes = hashes
        self._requested = 0  # number of leading blocks that were requested
        self.brought = 0

    async def run(self, giver: "Stream", taker: "Stream") -> None:
        """Copy all blocks, or as many as possible, requesting the next blocks in advance."""
        await self._request(giver, _FIRST_BLOCKS)
        while True:
            blocks = (await _answer(giver, "exported")).exported
            count = len(blocks.hashes) // HASH_BYTES
            if not count:
                return
            self._requested = self.brought + count
            is_last = self._requested * HASH_BYTES >= len(self._hashes)
            if not is_last:
                await self._request(giver, max(1, _MESSAGE_BYTES // max(1, blocks.block_bytes)))
            await taker.send(engine.HostRequest(import_kv=engine.Import(blocks=blocks)))
            imported = (await _answer(taker, "imported")).imported.blocks
            self.brought += imported
            if is_last or imported < count:
                return

    async def _request(self, giver: "Stream", count: int) -> None:
        start = self._requested * HASH_BYTES
        wanted = self._hashes[start : start + count * HASH_BYTES]
        await giver.send(engine.HostRequest(export_kv=engine.Export(hashes=wanted)))


async def _answer(stream: "Stream", kind: str) -> engine.HostFrame:
    frame = await stream.receive(None)
    if frame is None:
        raise FailedError(ErrorCode.REPLICA_LOST, "the host ended the stream")
    if frame.WhichOneof("kind") != kind:
        text = frame.refused.message if frame.HasField("refused") else "an answer to nothing asked"
        raise FailedError(ErrorCode.ENGINE_FAILED, text)
    return frame
