"""Implements a driver by the scheduler and a backend that computes steps.

Engines differ only in their backend. It receives a plan and returns the new tokens of the sampled
sequences. If a step fails, only the sequences of this step end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replica.engine.backend import Backend, ResizableBackend, StepFailedError
from replica.engine.plan import Adapter
from replica.engine.scheduler import EngineScheduler
from replica.engine.types import (
    URGENT_PRIORITY,
    AdapterState,
    Capabilities,
    EngineLoad,
    KvBlocks,
    Limits,
    RefusedError,
    SequenceRequest,
    StepEvents,
)
from replica.engine.validation import check_request
from sluice.errors import ErrorCode
from sluice.hashing import HASH_BYTES


class ScheduledEngine:
    """The `Driver` of every engine that uses this project's own scheduler."""

    def __init__(
        self,
        name: str,
        scheduler: EngineScheduler,
        backend: Backend,
        clock: Callable[[], float],
        *,
        draft_tokens: int = 0,
    ) -> None:
        """Connect scheduler and backend. `draft_tokens` is the default length of a draft."""
        self._draft_tokens = draft_tokens
        slots = backend.capabilities.adapter_slots
        assert scheduler.adapters.slots == slots, (scheduler.adapters.slots, slots)
        self._name = name
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._step_s = 0.0
        self._step_prompt_tokens = 0
        # time when the previous step ended, or None if the engine had no work after that step
        self._ended_at_s: float | None = None

    @property
    def name(self) -> str:
        """Kind of engine, for example openvino or sim."""
        return self._name

    @property
    def limits(self) -> Limits:
        """The limits of the engine, constant after loading."""
        return self._scheduler.limits

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine, constant after loading."""
        return self._backend.capabilities

    @property
    def has_work(self) -> bool:
        """Whether the next `step()` would compute tokens or report events."""
        return self._scheduler.has_work

    @property
    def scheduler(self) -> EngineScheduler:
        """The scheduler with its pool and counters, for tests and tools."""
        return self._scheduler

    def add(self, request: SequenceRequest) -> None:
        """Accept a sequence and its forks. Raises RefusedError if this engine cannot serve them."""
        check_request(request, self.limits, self.capabilities)
        digest = request.adapter_digest
        if digest and not self.has_adapter(digest):
            raise RefusedError(
                ErrorCode.ADAPTER_NOT_FOUND,
                f"adapter {digest[:12]} is not in this engine; load it before its sequences",
                param="adapter_digest",
            )
        self._backend.check_request(request)
        is_probe = request.priority >= URGENT_PRIORITY
        if self._draft_tokens and not request.draft_tokens_max and not is_probe:
            request = replace(request, draft_tokens_max=self._draft_tokens)
        self._scheduler.add(request)

    def check_grammar(self, request: SequenceRequest) -> None:
        """Compile and cache the grammar of a request, in any thread, before `add`."""
        self._backend.check_request(request)

    def cancel(self, key: int) -> None:
        """End a sequence at the next step."""
        self._scheduler.cancel(key)

    def step(self) -> StepEvents:
        """Compute one step.

        While the engine has work, `EngineLoad.step_s` counts from the end of the previous step.
        """
        started_at_s = self._clock()
        plan = self._scheduler.plan(started_at_s)
        if plan:
            try:
                output = self._backend.run(plan)
            except StepFailedError as error:
                self._scheduler.fail(plan, str(error))
            except MemoryError as error:
                # A lack of memory is no bug. A smaller batch may fit, or the same batch later, when
                # other sequences have ended.
                self._scheduler.fail(plan, f"no memory for a step of {plan.tokens} tokens: {error}")
            else:
                now_s = self._clock()
                self._scheduler.commit(plan, output, now_s)
                self._step_s = now_s - (self._ended_at_s or started_at_s)
                self._step_prompt_tokens = sum([count for _, count in plan.prefill])
                self._ended_at_s = now_s
        events = self._scheduler.take_events()
        if not self._scheduler.has_work:  # which is true as long as events were not taken
            self._ended_at_s = None
        return events

    def load(self) -> EngineLoad:
        """Return the load of the engine after its last step."""
        pool = self._scheduler.pool
        if pool.pinned:
            pool.expire_pins(self._clock())
        return self._scheduler.load(self._step_s, self._step_prompt_tokens)

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return self._scheduler.pool.cached()

    def read_adapter(self, digest: str, directory: Path) -> Adapter:
        """Read and check an adapter, in any thread. Raises RefusedError if it cannot be served."""
        return self._backend.read_adapter(digest, directory)

    def put_adapter(self, digest: str, adapter: Adapter) -> None:
        """Store an adapter in host memory. Raises RefusedError if other adapters leave no room."""
        self._scheduler.adapters.put(digest, adapter)

    def drop_adapter(self, digest: str) -> None:
        """Drop an adapter as soon as its last sequence has ended."""
        self._scheduler.adapters.drop(digest)

    def has_adapter(self, digest: str) -> bool:
        """Whether new sequences may use this adapter at present."""
        return self._scheduler.adapters.has(digest)

    def adapters(self) -> list[AdapterState]:
        """Return the adapters in slots and in host memory."""
        return self._scheduler.adapter_states()

    def export_blocks(self, hashes: Sequence[bytes]) -> KvBlocks:
        """Return the contents of the cached blocks among `hashes`, up to the first missing one."""
        self._check_transfer()
        pool = self._scheduler.pool
        blocks = pool.find(list(hashes))
        found = tuple(hashes[: len(blocks)])
        pool.share(blocks)
        try:
            data = self._backend.read_blocks(blocks)
        finally:
            pool.release(blocks)
        return KvBlocks(self._backend.block_layout, found, tuple(data))

    def import_blocks(self, blocks: KvBlocks) -> int:
        """Add blocks to the cache where there is room.

        Returns how many of the blocks, counted from the first, are now in the cache. Imported
        blocks use free blocks and evict idle blocks, but never pinned blocks or blocks in use.
        """
        self._check_transfer()
        _check_blocks(blocks, self._backend.block_layout)
        pool = self._scheduler.pool
        # Cached blocks of this chain are held first. Otherwise, the new blocks could evict them.
        held = pool.find_each(blocks.hashes)
        pool.share(list(held.values()))
        taken: dict[bytes, int] = {}
        data: list[bytes] = []
        for key, content in zip(blocks.hashes, blocks.data, strict=True):
            if key not in held:
                block = pool.take()
                if block is None:
                    break
                taken[key] = block
                data.append(content)
        new = list(taken.values())
        try:
            self._backend.write_blocks(new, data)
            pool.publish(new, list(taken), 0, len(new))
        finally:
            pool.release(new)
            pool.release(list(held.values()))
        return len(pool.find(list(blocks.hashes)))

    def sleep(self, blocks: int) -> bool:
        """Free all KV memory except for `blocks` blocks. Returns False if that is impossible.

        The engine cannot sleep while it has work, or if its backend cannot free memory.
        """
        backend = self._backend
        if not isinstance(backend, ResizableBackend) or self.has_work:
            return False
        backend.use(backend.allocated(blocks))
        self._scheduler.pool.resize(blocks)
        return True

    def restored(self) -> Any:
        """Allocate and return KV memory of full size. Any thread may call this."""
        assert isinstance(self._backend, ResizableBackend)
        return self._backend.allocated(self.limits.kv_blocks)

    def wake(self, memory: Any) -> None:
        """Use the given memory for all KV blocks again. No sequence may be running."""
        assert isinstance(self._backend, ResizableBackend)
        self._backend.use(memory)
        self._scheduler.pool.resize(self.limits.kv_blocks)

    def _check_transfer(self) -> None:
        if not self.capabilities.has_kv_transfer:
            message = f"engine {self.name} can neither hand out KV blocks nor take them"
            raise RefusedError(ErrorCode.UNSUPPORTED_PARAMETER, message)
        if not self._scheduler.has_prefix_cache:
            message = "KV blocks move between prefix caches; switch on the option prefix_cache"
            raise RefusedError(ErrorCode.UNSUPPORTED_PARAMETER, message)


def _check_blocks(blocks: KvBlocks, layout: str) -> None:
    """Raise RefusedError if blocks are malformed, or come from an engine with another layout."""
    hashes, sizes = blocks.hashes, {len(data) for data in blocks.data}
    message = ""
    if blocks.layout != layout:
        message = f"the blocks are {blocks.layout!r}, those of this engine {layout!r}"
    elif len(hashes) != len(blocks.data) or len(set(hashes)) != len(hashes):
        message = (
            f"{len(set(hashes))} different hashes of {len(hashes)} for {len(blocks.data)} blocks;"
            " send each block once, with its hash"
        )
    elif any(len(key) != HASH_BYTES for key in hashes):
        message = f"a block's hash has not {HASH_BYTES} bytes"
    elif len(sizes) > 1:
        message = f"the blocks have {sorted(sizes)} bytes, but must be of one size"
    if message:
        raise RefusedError(ErrorCode.INVALID_REQUEST, message)
