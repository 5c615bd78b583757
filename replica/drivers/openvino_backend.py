"""Computes steps with OpenVINO's paged attention operator, in one graph call per batch.

Two graphs share one KV pool and the files of the weights. The first graph has no LoRA inputs,
because these cost time even when no adapter is used. The second graph has LoRA inputs. The thread
that reads the first adapter compiles the second graph, so that the batch continues meanwhile.
"""

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import openvino as ov

from replica.drivers.kv_pool import KvPool
from replica.drivers.lora_slots import LoraSlots
from replica.engine.backend import StepFailedError
from replica.engine.graph import SAMPLED_ROWS, Base, build_graph, paged
from replica.engine.lora import LoraAdapter, read_adapter
from replica.engine.plan import (
    NO_SLOT,
    Adapter,
    ScheduledSequence,
    StepOutput,
    StepPlan,
)
from replica.engine.sampler import Sampler
from replica.engine.types import Capabilities, RefusedError, SequenceRequest
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS

log = logging.getLogger(__name__)

# Numbers of tokens in the warm-up calls. They fit into the one block of the temporary pool.
_WARM_UP_TOKENS = (1, 8, 32)


class OpenvinoBackend:
    """The compiled graphs of a base, their KV pool and their adapter slots."""

    def __init__(
        self,
        base: Base,
        sampler: Sampler,
        properties: Mapping[str, str],
        *,
        blocks: int,
        capabilities: Capabilities,
        has_two_graphs: bool,
    ) -> None:
        """Compile the graph for the first step and allocate a pool of `blocks`.

        Args:
            base: Base, whose files must stay open because compiled graphs read them.
            sampler: Sampler for logits of this base.
            properties: Properties of the CPU plugin.
            blocks: Number of KV blocks.
            capabilities: Capabilities, which include the number and rank of adapter slots.
            has_two_graphs: Whether steps without adapters have a separate graph. A single graph
                needs less memory, because each compiled graph has its own copy of the weights.
        """
        self.capabilities = capabilities
        self._base = base
        self._sampler = sampler
        self._properties = dict(properties)
        self._core = ov.Core()
        self._lora_lock = Lock()
        self._lora_request: Any = None
        self._slots: LoraSlots | None = None
        has_lora = capabilities.adapter_slots > 0 and not has_two_graphs
        compiled = self._compile(has_lora=has_lora)
        self._ports = compiled.inputs
        self._pool = KvPool(self._ports, blocks)
        self._base_request: Any = None
        if has_lora:
            self._enable_lora(compiled)
        else:
            self._base_request = self._warm_request(compiled, None)
            self._pool.attach(self._base_request)

    @property
    def block_layout(self) -> str:
        """Description of the layout of a KV block's bytes."""
        return self._pool.layout

    def check_request(self, request: SequenceRequest) -> None:
        """Raise RefusedError if the sequence cannot be sampled."""
        self._sampler.check(request)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute the plan. Raises StepFailedError if the graph call fails."""
        batch = StepBatch(plan)
        with _graph_call():
            request = self._set_inputs(plan, batch)
            request.start_async()
        try:
            self._sampler.prepare(plan)
        finally:
            with _graph_call():
                request.wait()
        self._pool.copy(plan.copies)
        if not batch.sampled:
            return StepOutput()
        logits = request.get_tensor("logits").data
        return self._sampler.sample(logits.reshape(-1, self._base.config.vocabulary), plan)

    def read_adapter(self, digest: str, directory: Path) -> Adapter:
        """Read and check an adapter, in any thread. The first adapter compiles the LoRA graph."""
        limit = self.capabilities.adapter_rank_max
        if not limit:
            raise RefusedError(
                ErrorCode.UNSUPPORTED_PARAMETER, "this engine serves its base alone, no adapters"
            )
        adapter = read_adapter(digest, directory, self._base.config, limit)
        with self._lora_lock:
            if self._slots is None:
                self._enable_lora(self._compile(has_lora=True))
        return adapter

    def allocated(self, blocks: int) -> KvPool:
        """Allocate and return KV memory for this many blocks. Any thread may call this."""
        return KvPool(self._ports, blocks)

    def use(self, memory: KvPool) -> None:
        """Replace the KV memory by the given memory, and free the previous memory."""
        with self._lora_lock:
            self._pool = memory
            for request in (self._base_request, self._lora_request):
                if request is not None:
                    memory.attach(request)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of KV blocks."""
        return self._pool.read(blocks)

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Replace the contents of KV blocks.

        Raises RefusedError if a block's content has the wrong length.
        """
        self._pool.write(blocks, data)

    def _compile(self, *, has_lora: bool) -> Any:
        began_s = time.monotonic()
        graph = build_graph(self._base, has_sampled_rows=True, has_lora=has_lora)
        paged(graph, self._base.config.windows)
        compiled = self._core.compile_model(graph, "CPU", self._properties)
        kind = "adapters" if has_lora else "base"
        log.info("graph_compiled: %s in %.1f s", kind, time.monotonic() - began_s)
        return compiled

    def _enable_lora(self, compiled: Any) -> None:
        limits = self.capabilities
        slots = LoraSlots(self._base.config, limits.adapter_slots, limits.adapter_rank_max)
        request = self._warm_request(compiled, slots)
        self._pool.attach(request)
        self._slots, self._lora_request = slots, request

    def _warm_request(self, compiled: Any, slots: LoraSlots | None) -> Any:
        """Return a request that has already computed some steps on a temporary KV pool.

        The first steps of a graph copy the weights and compile kernels. In the step loop they would
        delay the batch.
        """
        request = compiled.create_infer_request()
        KvPool(compiled.inputs, 1).attach(request)
        for tokens in _WARM_UP_TOKENS:
            sequence = ScheduledSequence(SequenceRequest(0, [0] * tokens, 1), 0, b"", frozenset())
            sequence.blocks = [0]
            batch = StepBatch(StepPlan([], [(sequence, tokens)]))
            if slots is not None:
                slots.attach(request, tokens, [(0, 0, tokens)])
            batch.set(request)
            request.infer()
        return request

    def _set_inputs(self, plan: StepPlan, batch: "StepBatch") -> Any:
        """Load the step's adapters into slots, and return the request that computes the batch."""
        for slot, adapter in plan.loads:
            assert self._slots is not None
            assert isinstance(adapter, LoraAdapter)
            self._slots.load(slot, adapter)
        request = self._base_request
        if request is None or any(sequence.slot != NO_SLOT for sequence in batch.sequences):
            assert self._slots is not None, "adapters are read before sequences use them"
            request = self._lora_request
            self._slots.attach(request, len(batch.ids), batch.users())
        batch.set(request)
        return request


@contextmanager
def _graph_call() -> Generator[None]:
    """Translate exceptions of the plugin into StepFailedError."""
    try:
        yield
    except RuntimeError as error:
        raise StepFailedError(f"the graph call failed: {error}") from error


class StepBatch:
    """The token rows of a step, `plan.decode` before `plan.prefill`."""

    def __init__(self, plan: StepPlan) -> None:
        """Arrange the rows of a plan. Logits have the order that `replica.engine.plan` defines."""
        self.sequences: list[ScheduledSequence] = plan.decode.copy()
        self.ids = [sequence.tokens[-1] for sequence in plan.decode]
        self.positions = [sequence.computed for sequence in plan.decode]
        self.past = self.positions.copy()
        self.begins = list(range(len(self.ids) + 1))
        if plan.drafts:
            self._add_drafts(plan)
        self.sampled = list(range(len(self.ids)))
        scored: list[int] = []
        for sequence, count in plan.prefill:
            first, end = sequence.computed, sequence.computed + count
            begin = len(self.ids)
            self.ids += sequence.tokens[first:end]
            self.positions += range(first, end)
            self.past.append(first)
            self.begins.append(len(self.ids))
            self.sequences.append(sequence)
            if end == len(sequence.tokens):
                self.sampled.append(len(self.ids) - 1)
            scored += [begin + row for row in sequence.logprob_rows(count)]
        self.sampled += scored

    def _add_drafts(self, plan: StepPlan) -> None:
        self.ids, self.positions, self.begins = [], [], [0]
        for index, sequence in enumerate(plan.decode):
            run = [sequence.tokens[-1], *plan.drafts.get(index, ())]
            self.ids += run
            self.positions += range(sequence.computed, sequence.computed + len(run))
            self.begins.append(len(self.ids))

    def users(self) -> list[tuple[int, int, int]]:
        """Return (slot, first token, end) for the run of tokens of each sequence."""
        slots = (sequence.slot for sequence in self.sequences)
        return list(zip(slots, self.begins, self.begins[1:], strict=False))

    def set(self, request: Any) -> None:
        """Set the inputs of the paged graph, except for the pool and adapters."""
        blocks: list[int] = []
        block_begins = [0]
        longest = 0
        for sequence, first, begin, end in zip(
            self.sequences, self.past, self.begins, self.begins[1:], strict=False
        ):
            tokens = first + end - begin
            longest = max(longest, tokens)
            blocks += sequence.blocks[: -(-tokens // BLOCK_TOKENS)]
            block_begins.append(len(blocks))
        inputs = {
            "input_ids": np.array(self.ids, np.int64),
            "position_ids": np.array(self.positions, np.int64),
            "past_lens": np.array(self.past, np.int32),
            "subsequence_begins": np.array(self.begins, np.int32),
            "block_indices": np.array(blocks, np.int32),
            "block_indices_begins": np.array(block_begins, np.int32),
            "max_context_len": np.array(longest, np.int32),
            SAMPLED_ROWS: np.array(self.sampled, np.int64),
        }
        for name, array in inputs.items():
            request.set_tensor(name, ov.Tensor(array))
