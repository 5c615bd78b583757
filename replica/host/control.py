"""Answers requests about adapters and KV blocks, which start no sequence.

Only the step loop calls this module, because no other thread may use the driver. Background threads
verify, encode and send the blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from replica.engine.driver import Driver
from replica.engine.types import KvBlocks, RefusedError
from replica.host.adapters import AdapterDesk, Background
from replica.host.attachments import Reply, refused_frame
from replica.host.counters import HostCounters
from replica.host.kv_transfer import EXPORT_BYTES_MAX, pack_blocks, unpack_blocks
from replica.host.requests import decode_hashes
from sluice.errors import ErrorCode
from sluice.hashing import HASH_BYTES
from sluice.wire.engine.v1 import engine_pb2 as wire

ADAPTERS_MAX = 256  # largest number of adapters that one request may name
HASHES_MAX = 16384  # largest number of hashes that one request may name


class ControlDesk:
    """Answers all requests of routers and agents that are not inference."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        adapters: AdapterDesk,
        background: Background,
        counters: HostCounters,
    ) -> None:
        self._driver = driver
        self._base_digest = base_digest
        self._adapters = adapters
        self._background = background
        self._counters = counters
        self._block_bytes = 0  # size of one KV block in bytes, or 0 until the first export

    def adapters(self, message: wire.Adapters, reply: Reply) -> None:
        """Unload and load adapters, and answer with the list of adapters after the last load."""
        if len(message.load) + len(message.unload) > ADAPTERS_MAX:
            text = f"more than {ADAPTERS_MAX} adapters; name them in several requests"
            reply(refused_frame(RefusedError(ErrorCode.INVALID_REQUEST, text)))
            return
        for digest in message.unload:
            self._driver.drop_adapter(digest)
        owed = set(message.load)
        problems: list[wire.AdapterProblem] = []

        def loaded(digest: str, error: RefusedError | None) -> None:
            if error is not None:
                problems.append(
                    wire.AdapterProblem(digest=digest, code=error.code, message=error.message)
                )
            owed.discard(digest)
            if not owed:
                reply(self._adapter_list(problems))

        for digest in list(owed):
            self._adapters.fetch(digest, partial(loaded, digest))
        if not message.load:
            reply(self._adapter_list(problems))

    def export_kv(self, message: wire.Export, reply: Reply) -> None:
        """Answer with the first of the requested cached blocks, up to one message's size."""
        try:
            hashes = decode_hashes(message.hashes, HASH_BYTES, HASHES_MAX)
            blocks = self._export(hashes)
        except RefusedError as error:
            reply(refused_frame(error))
            return
        self._counters.kv_exported += len(blocks.hashes)

        def send() -> None:
            reply(wire.HostFrame(exported=pack_blocks(blocks, self._base_digest)))

        def sent(outcome: Any) -> None:
            if isinstance(outcome, Exception):
                reply(refused_frame(_refusal_of(outcome)))

        self._run(send, sent, reply)

    def import_kv(self, message: wire.Import, reply: Reply) -> None:
        """Verify blocks in a background thread, then add them to the cache and answer."""
        check = partial(unpack_blocks, message.blocks, self._base_digest)
        self._run(check, partial(self._checked, reply), reply)

    def _adapter_list(self, problems: list[wire.AdapterProblem]) -> wire.HostFrame:
        adapters = [
            wire.AdapterInfo(
                digest=state.digest,
                is_in_slot=state.is_in_slot,
                rank=state.rank,
                memory_bytes=state.memory_bytes,
                sequences=state.sequences,
                prompt_tokens=state.prompt_tokens,
                output_tokens=state.output_tokens,
                loads=state.loads,
            )
            for state in self._driver.adapters()
        ]
        return wire.HostFrame(adapters=wire.AdapterList(adapters=adapters, problems=problems))

    def _export(self, hashes: Sequence[bytes]) -> KvBlocks:
        if not self._block_bytes:
            first = self._driver.export_blocks(hashes[:1])
            if not first.data:
                return first
            self._block_bytes = len(first.data[0])
        fitting = max(1, EXPORT_BYTES_MAX // self._block_bytes)
        return self._driver.export_blocks(hashes[:fitting])

    def _checked(self, reply: Reply, outcome: Any) -> None:
        """Import blocks that `unpack_blocks` has verified, or answer with its error."""
        try:
            if isinstance(outcome, Exception):
                raise _refusal_of(outcome)
            imported = self._driver.import_blocks(outcome)
        except RefusedError as error:
            self._counters.kv_refused[error.code] += 1
            reply(refused_frame(error))
        else:
            self._counters.kv_imported += imported
            reply(wire.HostFrame(imported=wire.Imported(blocks=imported)))

    def _run(self, work: Callable[[], object], done: Callable[[Any], None], reply: Reply) -> None:
        if not self._background.run(work, done):
            text = "too many transfers at once; try again"
            reply(refused_frame(RefusedError(ErrorCode.ENGINE_BUSY, text)))


def _refusal_of(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    return RefusedError(ErrorCode.ENGINE_FAILED, f"the transfer failed: {error!r}")
