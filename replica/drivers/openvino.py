"""Driver `openvino`: continuous batching on a CPU, over OpenVINO's paged attention operator.

One graph call per step computes all prompt chunks and decoding rows together. The KV pool is host
memory of ours; which block belongs to whom is the scheduler's business.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from replica.drivers.options import OptionsError, parse_options
from replica.engine.artifact import read_base_facts
from replica.engine.core import ScheduledEngine
from replica.engine.graph import SAMPLED_ROWS, build_graph, paged
from replica.engine.plan import ScheduledSequence, StepFailedError, StepOutput, StepPlan
from replica.engine.sampling import sample
from replica.engine.scheduler import Scheduler
from replica.engine.types import Limits
from sluice.hashing import BLOCK_TOKENS, cache_root

# The plugin keeps a compiled kernel per input shape: without a bound, memory grows for ever.
_KERNEL_CACHE = "64"
_PRECISIONS = {"auto", "f32", "bf16"}
_KV_PRECISIONS = {"auto", "f32", "bf16", "u8"}


@dataclass(frozen=True, slots=True)
class OpenvinoOptions:
    """What SLUICE_ENGINE_OPTIONS may set.

    Attributes:
        threads: One is fastest for small models on a busy machine: more wait for one another.
        blocks: KV pool, of 32 tokens each.
        step_tokens_max: Tokens per graph call; larger ones delay those who decode.
        context_tokens_max: 0: as the base says.
        precision: Of the computation; auto: bf16 where the CPU has instructions for it, else f32.
        kv_precision: Of the pool; auto: u8 with bf16, else f32 (which is deterministic).
    """

    threads: int = 1
    blocks: int = 2048
    step_tokens_max: int = 256
    sequences_max: int = 256
    context_tokens_max: int = 0
    prefix_cache: bool = True
    precision: str = "auto"
    kv_precision: str = "auto"


class OpenvinoBackend:
    """A compiled graph, its request and its KV pool."""

    def __init__(self, model: ov.Model, blocks: int, properties: Mapping[str, str]) -> None:
        """Compile `model` (paged form) and allocate a pool of `blocks`."""
        compiled = ov.Core().compile_model(model, "CPU", dict(properties))
        self._request = compiled.create_infer_request()
        self._pool: list[ov.Tensor] = []
        for port in compiled.inputs:
            name = port.any_name
            if name.startswith(("key_cache.", "value_cache.")):
                inner = [dimension.get_length() for dimension in list(port.partial_shape)[1:]]
                tensor = ov.Tensor(port.element_type, ov.Shape([blocks, *inner]))
                # Written once, so that the memory is there before the first request needs it.
                tensor.data[...] = 0
                self._request.set_tensor(name, tensor)
                self._pool.append(tensor)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute the plan; StepFailedError when the graph call fails."""
        try:
            for name, array in _inputs(plan).items():
                self._request.set_tensor(name, ov.Tensor(array))
            self._request.infer()
        except RuntimeError as error:
            raise StepFailedError(f"the graph call failed: {error}") from error
        if not plan.sampled:
            return StepOutput()
        logits = self._request.get_tensor("logits").data.reshape(len(plan.sampled), -1)
        rows = [(sequence.request.sampling, len(sequence.tokens)) for sequence in plan.sampled]
        return StepOutput(sample(logits, rows))


def _inputs(plan: StepPlan) -> dict[str, np.ndarray[Any, Any]]:
    """Return the input arrays of a step; rows are `plan.decode`, then `plan.prefill`."""
    ids = [sequence.tokens[-1] for sequence in plan.decode]
    positions = [sequence.computed for sequence in plan.decode]
    past = positions.copy()
    begins = list(range(len(ids) + 1))
    sampled = list(range(len(ids)))
    rows: list[ScheduledSequence] = plan.decode.copy()
    longest = max(positions, default=0) + 1
    for sequence, count in plan.prefill:
        first, end = sequence.computed, sequence.computed + count
        ids += sequence.tokens[first:end]
        positions += range(first, end)
        past.append(first)
        begins.append(len(ids))
        rows.append(sequence)
        longest = max(longest, end)
        if end == len(sequence.tokens):
            sampled.append(len(ids) - 1)
    blocks: list[int] = []
    block_begins = [0]
    for sequence, first, begin, end in zip(rows, past, begins, begins[1:], strict=False):
        needed = -(-(first + end - begin) // BLOCK_TOKENS)
        blocks += sequence.blocks[:needed]
        block_begins.append(len(blocks))
    return {
        "input_ids": np.array(ids, np.int64),
        "position_ids": np.array(positions, np.int64),
        "past_lens": np.array(past, np.int32),
        "subsequence_begins": np.array(begins, np.int32),
        "block_indices": np.array(blocks, np.int32),
        "block_indices_begins": np.array(block_begins, np.int32),
        "max_context_len": np.array(longest, np.int32),
        SAMPLED_ROWS: np.array(sampled, np.int64),
    }


def choose_precision(options: OpenvinoOptions, cpu_flags: frozenset[str]) -> tuple[str, str]:
    """Return (precision of the computation, precision of the pool); OptionsError if impossible."""
    if options.precision not in _PRECISIONS or options.kv_precision not in _KV_PRECISIONS:
        raise OptionsError(
            f"precision {options.precision!r}, kv_precision {options.kv_precision!r}; known are"
            f" {sorted(_PRECISIONS)} and {sorted(_KV_PRECISIONS)}"
        )
    precision, kv_precision = options.precision, options.kv_precision
    if precision == "auto":
        has_bf16 = bool(cpu_flags & {"avx512_bf16", "amx_bf16"})
        precision = "bf16" if has_bf16 else "f32"
    if kv_precision == "auto":
        kv_precision = "u8" if precision == "bf16" else "f32"
    if kv_precision in ("f32", "bf16") and kv_precision != precision:
        raise OptionsError(
            f"kv_precision {kv_precision} needs precision {kv_precision}, not {precision}"
        )
    return precision, kv_precision


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of this CPU; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def load_openvino(
    directory: Path,
    base_digest: str,
    options: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ScheduledEngine:
    """Return the engine for the base in `directory`, compiled and ready.

    Raises:
        OptionsError: An option is unknown, of the wrong type, or impossible.
        ArtifactError: Not a base that the graph computes rightly.
    """
    chosen = parse_options(OpenvinoOptions, options)
    precision, kv_precision = choose_precision(chosen, read_cpu_flags())
    facts = read_base_facts(directory)
    limits = Limits(
        context_tokens_max=min(
            chosen.context_tokens_max or facts.context_tokens, facts.context_tokens
        ),
        sequences_max=chosen.sequences_max,
        step_tokens_max=chosen.step_tokens_max,
        kv_blocks=chosen.blocks,
        vocabulary=facts.vocabulary,
    )
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": kv_precision,
        "INFERENCE_NUM_THREADS": str(chosen.threads),
        "CPU_RUNTIME_CACHE_CAPACITY": _KERNEL_CACHE,
    }
    graph = paged(build_graph(directory, has_sampled_rows=True))
    backend = OpenvinoBackend(graph, chosen.blocks, properties)
    scheduler = Scheduler(
        limits,
        root=cache_root(base_digest, "", b""),
        eos_ids=facts.eos_ids,
        prefix_cache=chosen.prefix_cache,
    )
    return ScheduledEngine("openvino", scheduler, backend, clock)
