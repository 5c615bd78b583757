"""Loads the driver `openvino`, an engine for CPUs with continuous batching, from its options."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replica.drivers.openvino_backend import OpenvinoBackend
from replica.drivers.options import OptionsError, parse_options
from replica.engine.adapter_table import AdapterTable
from replica.engine.artifact import BaseFacts, read_base_facts
from replica.engine.core import ScheduledEngine
from replica.engine.grammar import GrammarCompiler
from replica.engine.graph import read_base
from replica.engine.sampler import Sampler
from replica.engine.scheduler import EngineScheduler
from replica.engine.speculation import DRAFT_TOKENS_MAX
from replica.engine.types import Capabilities, Limits
from sluice.adapter_ranks import adapter_room
from sluice.hashing import cache_root

_ROOM = adapter_room("openvino")

log = logging.getLogger(__name__)

# Largest number of compiled kernels that the plugin caches, one per input shape, to limit memory.
_KERNEL_CACHE = "64"
# Parameters per thread. With fewer, a second thread waits longer than it computes. With 3.9 M
# parameters a second thread slows the engine down, and with 100 M it almost doubles the speed.
_PARAMETERS_PER_THREAD = 25_000_000
# Largest number of bytes of weights for which `base_graph` auto permits a second graph. Each graph
# has its own copy of the weights.
_SECOND_GRAPH_BYTES_MAX = 256 << 20
_LOGPROBS_MAX = 20  # alternatives per token, the limit of OpenAI's API
_BASE_GRAPH = {"auto", "on", "off"}
_PRECISIONS = {"auto", "f32", "bf16"}
_KV_PRECISIONS = {"auto", "f32", "bf16", "u8"}


@dataclass(frozen=True, slots=True)
class OpenvinoOptions:
    """Options of the driver `openvino`, set by SLUICE_ENGINE_OPTIONS.

    Attributes:
        threads: Threads of the computation, or 0 for a number that fits the size of the base. One
            thread is fastest for small bases on a busy machine, where several threads would wait
            for one another.
        blocks: Number of blocks of the KV pool, each of 32 tokens.
        step_tokens_max: Largest number of tokens per graph call. Larger calls delay the sequences
            that decode.
        context_tokens_max: Largest number of tokens of a sequence, or 0 for the base's own limit.
        precision: Number format of the computation. auto means bf16 if the CPU has instructions for
            bf16, else f32.
        kv_precision: Number format of the KV pool. auto means u8 if the computation is bf16, else
            f32, whose results are deterministic.
        adapter_slots: Number of adapters in one batch, or 0 for an engine without adapters.
        adapter_rank: Largest rank of an adapter. The cost of a step grows with this value.
        adapter_memory_bytes: Largest number of bytes of all adapters in host memory.
        base_graph: Whether steps without adapters use a separate graph (on, off, auto). A separate
            graph is twice as fast for small bases, but needs a second copy of the weights. auto
            means on for small bases.
        draft_tokens: Tokens that prompt lookup speculates per step and sequence, 0 to 16. -1 means
            `prompt_lookup_num_tokens` of the base's generation_config.json, or 0 without that
            field.
    """

    threads: int = 0
    blocks: int = 2048
    step_tokens_max: int = 256
    sequences_max: int = 256
    context_tokens_max: int = 0
    prefix_cache: bool = True
    precision: str = "auto"
    kv_precision: str = "auto"
    adapter_slots: int = _ROOM.slots
    adapter_rank: int = _ROOM.rank
    adapter_memory_bytes: int = 1 << 30
    base_graph: str = "auto"
    draft_tokens: int = -1


def choose_precision(options: OpenvinoOptions, cpu_flags: frozenset[str]) -> tuple[str, str]:
    """Return (precision of the computation, precision of the KV pool).

    Raises OptionsError if the options or the CPU do not permit them.
    """
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
    if kv_precision == "bf16" and cpu_flags and "avx512f" not in cpu_flags:
        # OpenVINO's attention supports a bf16 pool only with these instructions (2026.4).
        raise OptionsError("kv_precision bf16 needs a CPU with AVX-512: use u8")
    return precision, kv_precision


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of this CPU, or none if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def choose_threads(threads: int, parameters: int, cpus: int) -> int:
    """Return the number of threads. For 0, the number follows from the number of parameters."""
    return threads or max(1, min(cpus, parameters // _PARAMETERS_PER_THREAD))


def has_base_graph(choice: str, slots: int, weight_bytes: int) -> bool:
    """Return whether steps without adapters have a separate graph. Raises OptionsError."""
    if choice not in _BASE_GRAPH:
        raise OptionsError(f"base_graph {choice!r}; known are {sorted(_BASE_GRAPH)}")
    if slots == 0 or choice != "auto":
        return slots == 0 or choice == "on"
    return weight_bytes <= _SECOND_GRAPH_BYTES_MAX


def choose_drafts(wanted: int, facts: BaseFacts) -> int:
    """Return the number of speculated tokens per step.

    Raises OptionsError if the option is out of range.
    """
    if not -1 <= wanted <= DRAFT_TOKENS_MAX:
        text = f"draft_tokens {wanted} is not in 0..{DRAFT_TOKENS_MAX}; -1: as the base says"
        raise OptionsError(text)
    return min(facts.draft_tokens, DRAFT_TOKENS_MAX) if wanted < 0 else wanted


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
        ArtifactError: The directory has no base that the graph computes correctly.
    """
    chosen = parse_options(OpenvinoOptions, options)
    if chosen.adapter_slots < 0 or chosen.adapter_rank < 1:
        raise OptionsError(
            f"adapter_slots {chosen.adapter_slots} must be at least 0, adapter_rank"
            f" {chosen.adapter_rank} at least 1"
        )
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
    began_s = time.monotonic()
    base = read_base(directory)
    threads = choose_threads(chosen.threads, base.parameters, len(os.sched_getaffinity(0)))
    log.info(
        "engine_loading: %s: %d parameters, %d bytes, %s, KV %s, %d threads",
        *(directory, base.parameters, base.weight_bytes, precision, kv_precision, threads),
    )
    grammars = _grammars(directory, facts, threads)
    backend = OpenvinoBackend(
        base,
        Sampler(facts.vocabulary, facts.eos_ids, grammars),
        _properties(precision, kv_precision, threads),
        blocks=chosen.blocks,
        capabilities=_capabilities(chosen, has_grammars=grammars is not None),
        has_two_graphs=has_base_graph(chosen.base_graph, chosen.adapter_slots, base.weight_bytes),
    )
    scheduler = EngineScheduler(
        limits,
        root=cache_root(base_digest, "", b""),
        eos_ids=facts.eos_ids,
        prefix_cache=chosen.prefix_cache,
        adapters=AdapterTable(chosen.adapter_slots, chosen.adapter_memory_bytes),
    )
    log.info("engine_loaded: %s in %.1f s", directory, time.monotonic() - began_s)
    width = choose_drafts(chosen.draft_tokens, facts)
    return ScheduledEngine("openvino", scheduler, backend, clock, draft_tokens=width)


def _properties(precision: str, kv_precision: str, threads: int) -> dict[str, str]:
    """Return the properties for the CPU plugin."""
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": kv_precision,
        "INFERENCE_NUM_THREADS": str(threads),
        "CPU_RUNTIME_CACHE_CAPACITY": _KERNEL_CACHE,
        # Without this setting, the plugin rounds activations to 8 bits if weights are INT8. That
        # changes logits by 0.1.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }


def _grammars(directory: Path, facts: BaseFacts, threads: int) -> GrammarCompiler | None:
    """Return the compiler of grammars, or None if the base has no tokenizer."""
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.exists():
        return None
    return GrammarCompiler(tokenizer, facts.vocabulary, facts.eos_ids, threads=threads)


def _capabilities(options: OpenvinoOptions, *, has_grammars: bool) -> Capabilities:
    return Capabilities(
        adapter_slots=options.adapter_slots,
        adapter_rank_max=options.adapter_rank if options.adapter_slots else 0,
        logprobs_max=_LOGPROBS_MAX,
        has_prompt_logprobs=True,
        has_scores=True,
        has_penalties=True,
        has_grammars=has_grammars,
        has_drafts=True,
        has_kv_transfer=True,
    )
