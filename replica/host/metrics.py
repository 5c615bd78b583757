"""Defines the metrics of an engine host on Triton's port, and computes their values.

Families that TensorRT-LLM's own backend also has use the backend's names and label values, so one
dashboard can read both. Families for which only TensorRT-LLM has values (memory on the GPU,
micro-batches, paused requests) are absent.

This module is pure, and `model_repo/llm/1/model.py` writes the values to Triton.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from replica.engine.types import AdapterState, EngineLoad, Limits
from replica.host.counters import HostCounters
from sluice.hashing import BLOCK_TOKENS

# largest number of adapters with their own series, while all other adapters share one series
ADAPTER_LABELS_MAX = 32
_LABEL_CHARS = 12
_OTHER = "other"
# Largest number of adapters whose totals are stored after the engine has dropped the adapter.
_SEEN_MAX = 10_000
_LENGTHS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # bounds of TensorRT-LLM's histograms, in tokens
_STEPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class MetricKind(StrEnum):
    """The kind of a metric. A gauge is set, a counter is raised, and a histogram observes."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, without the labels `model` and `version`, which every metric has.

    Attributes:
        name: Name in the Prometheus text format.
        kind: Kind of the metric.
        text: Description of the family.
        labels: Names of the labels.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A value of one series: the present value of a gauge, a counter's total, or an observation."""

    family: Family
    labels: tuple[str, ...]
    value: float


REQUESTS = Family(
    "nv_trt_llm_request_metrics",
    MetricKind.GAUGE,
    "Sequences: active = scheduled (running, of them context: computing their prompt) + waiting",
    ("request_type",),
)
MEMORY = Family(
    "nv_trt_llm_runtime_memory_metrics",
    MetricKind.GAUGE,
    "Bytes of memory of the engine's process",
    ("memory_type",),
)
BLOCKS = Family(
    "nv_trt_llm_kv_cache_block_metrics",
    MetricKind.GAUGE,
    "KV cache blocks; reused: found in the prefix cache since the start; fraction: used of max",
    ("kv_cache_block_type",),
)
BATCHER = Family(
    "nv_trt_llm_inflight_batcher_metrics",
    MetricKind.GAUGE,
    "generation_requests: running sequences that generate; total_context_tokens: prompt tokens"
    " computed in the last step",
    ("inflight_batcher_specific_metric",),
)
GENERAL = Family(
    "nv_trt_llm_general_metrics",
    MetricKind.GAUGE,
    "Time of this look in microseconds since 1970, and engine steps since the start",
    ("general_type",),
)
INPUT_LENGTH = Family(
    "nv_llm_input_token_len",
    MetricKind.HISTOGRAM,
    "Prompt tokens of sequences that ended",
    ("response_metric_type",),
    _LENGTHS,
)
OUTPUT_LENGTH = Family(
    "nv_llm_output_token_len",
    MetricKind.HISTOGRAM,
    "Output tokens of sequences that ended",
    ("response_metric_type",),
    _LENGTHS,
)
ENDED = Family(
    "llm_sequences_ended_total", MetricKind.COUNTER, "Sequences by finish reason", ("reason",)
)
OUTPUT = Family("llm_output_tokens_total", MetricKind.COUNTER, "Tokens emitted")
PREFIX = Family(
    "llm_prefix_cache_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens by prefix cache result: hit or miss",
    ("result",),
)
PREEMPTIONS = Family(
    "llm_preemptions_total", MetricKind.COUNTER, "Sequences put back into the queue"
)
DRAFTS = Family(
    "llm_draft_tokens_total",
    MetricKind.COUNTER,
    "Tokens of speculative decoding: proposed, and of them accepted",
    ("result",),
)
GRAMMARS = Family(
    "llm_grammar_sequences_total",
    MetricKind.COUNTER,
    "Sequences taken whose answer a grammar binds",
)
ADAPTERS = Family(
    "llm_adapters",
    MetricKind.GAUGE,
    "Adapters that the engine holds: in a slot or in memory",
    ("place",),
)
ADAPTER_SLOTS = Family(
    "llm_adapter_slot_changes_total",
    MetricKind.COUNTER,
    "Adapters put into a slot (load) and taken out (evict)",
    ("change",),
)
ADAPTER_FAILURES = Family(
    "llm_adapter_failures_total", MetricKind.COUNTER, "Adapters that could not be read or held"
)
ADAPTER_FETCHES = Family(
    "llm_adapter_fetches_total",
    MetricKind.COUNTER,
    "Adapters that the node did not have when a request, or a prefetch, needed them",
)
ADAPTER_WAITS = Family(
    "llm_adapter_wait_seconds",
    MetricKind.HISTOGRAM,
    "How long sequences waited until their adapter was fetched and in host memory; those that found"
    " it there are not counted",
    buckets=_WAITS_S,
)
ADAPTER_TOKENS = Family(
    "llm_adapter_tokens_total",
    MetricKind.COUNTER,
    f"Tokens by adapter, the first {_LABEL_CHARS} digits of its digest; those beyond the first"
    f" {ADAPTER_LABELS_MAX} that were used count as `{_OTHER}`",
    ("adapter", "kind"),
)
PINNED = Family("llm_kv_blocks_pinned", MetricKind.GAUGE, "KV blocks that may not be evicted now")
TRANSFERRED = Family(
    "llm_kv_transfer_blocks_total",
    MetricKind.COUNTER,
    "KV blocks handed to other engines (export) and taken from them (import)",
    ("direction",),
)
IMPORTS_REFUSED = Family(
    "llm_kv_imports_refused_total", MetricKind.COUNTER, "Imports of KV blocks refused", ("code",)
)
STEPS = Family(
    "llm_step_seconds", MetricKind.HISTOGRAM, "Duration of engine steps", buckets=_STEPS_S
)
STEP_AGE = Family(
    "llm_step_age_seconds",
    MetricKind.GAUGE,
    "Age of the step in progress; one that grows beyond seconds is stuck",
)

FAMILIES: tuple[Family, ...] = (
    *(REQUESTS, MEMORY, BLOCKS, BATCHER, GENERAL, INPUT_LENGTH, OUTPUT_LENGTH),
    *(ENDED, OUTPUT, PREFIX, PREEMPTIONS, DRAFTS, GRAMMARS),
    *(ADAPTERS, ADAPTER_SLOTS, ADAPTER_FAILURES, ADAPTER_FETCHES, ADAPTER_WAITS, ADAPTER_TOKENS),
    *(PINNED, TRANSFERRED, IMPORTS_REFUSED, STEPS, STEP_AGE),
)


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """A sample of a host's state.

    Attributes:
        load: Load after the last step.
        limits: Limits of the engine.
        counters: Counters since the start, whose lists `EngineMetrics.values` empties.
        adapters: Adapters in the engine's slots and host memory.
        step_age_s: Seconds since the present step began, or 0 between steps.
        memory_bytes: Resident memory of the process.
        time_us: Microseconds since 1970.
    """

    load: EngineLoad
    limits: Limits
    counters: HostCounters
    adapters: tuple[AdapterState, ...]
    step_age_s: float
    memory_bytes: int
    time_us: int


class EngineMetrics:
    """Computes values from samples, and decides which adapters have their own series."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], int] = {}  # (label, kind) -> total
        self._seen: dict[str, tuple[int, int]] = {}  # adapter's digest -> totals in the last sample
        self._labels: dict[str, str] = {}

    def values(self, look: MetricsSample) -> list[Value]:
        """Return the value of every series for a sample."""
        return [*_load_values(look), *_counter_values(look), *self._adapter_values(look.adapters)]

    def _adapter_values(self, adapters: Iterable[AdapterState]) -> Iterator[Value]:
        places = {"slot": 0, "memory": 0}
        seen: dict[str, tuple[int, int]] = {}
        for state in sorted(adapters, key=lambda it: -it.output_tokens):
            places["slot" if state.is_in_slot else "memory"] += 1
            totals = (state.prompt_tokens, state.output_tokens)
            seen[state.digest] = totals
            before = self._seen.get(state.digest, (0, 0))
            # the engine has dropped the adapter since, and its totals started again at 0
            if totals[0] < before[0] or totals[1] < before[1]:
                before = (0, 0)
            for kind, now, then in zip(("prompt", "output"), totals, before, strict=True):
                if now > then:
                    series = (self._label(state.digest), kind)
                    self._tokens[series] = self._tokens.get(series, 0) + now - then
        self._seen = self._seen | seen if len(self._seen) < _SEEN_MAX else seen
        yield from (Value(ADAPTERS, (place,), count) for place, count in places.items())
        yield from (Value(ADAPTER_TOKENS, series, n) for series, n in self._tokens.items())

    def _label(self, digest: str) -> str:
        label = self._labels.get(digest)
        if label is None:
            if len(self._labels) >= ADAPTER_LABELS_MAX:
                return _OTHER
            label = self._labels[digest] = digest[:_LABEL_CHARS]
        return label


def _load_values(look: MetricsSample) -> Iterator[Value]:
    load, blocks = look.load, look.limits.kv_blocks
    requests = {
        "active": load.running + load.waiting,
        "max": look.limits.sequences_max,
        "scheduled": load.running,
        "context": load.prefilling,
        "waiting": load.waiting,
    }
    cache = {
        "max": blocks,
        "free": blocks - load.kv_blocks_used,
        "used": load.kv_blocks_used,
        "tokens_per": BLOCK_TOKENS,
        "reused": load.cached_tokens // BLOCK_TOKENS,
        "fraction": load.kv_blocks_used / blocks,
    }
    yield from (Value(REQUESTS, (name,), value) for name, value in requests.items())
    yield from (Value(BLOCKS, (name,), value) for name, value in cache.items())
    yield Value(BATCHER, ("generation_requests",), load.running - load.prefilling)
    yield Value(BATCHER, ("total_context_tokens",), load.step_prompt_tokens)
    yield Value(MEMORY, ("cpu",), look.memory_bytes)
    yield Value(GENERAL, ("timestamp",), look.time_us)
    yield Value(GENERAL, ("iteration_counter",), look.counters.steps)
    yield Value(PREFIX, ("hit",), load.cached_tokens)
    yield Value(PREFIX, ("miss",), load.prompt_tokens - load.cached_tokens)
    yield Value(PREEMPTIONS, (), load.preemptions)
    yield Value(DRAFTS, ("proposed",), load.draft_tokens)
    yield Value(DRAFTS, ("accepted",), load.accepted_tokens)
    yield Value(PINNED, (), load.kv_blocks_pinned)
    yield Value(STEP_AGE, (), look.step_age_s)


def _counter_values(look: MetricsSample) -> Iterator[Value]:
    counters = look.counters
    yield Value(OUTPUT, (), counters.output_tokens)
    yield Value(GRAMMARS, (), counters.grammars)
    yield Value(ADAPTER_SLOTS, ("load",), counters.adapter_loads)
    yield Value(ADAPTER_SLOTS, ("evict",), counters.adapter_evictions)
    yield Value(ADAPTER_FAILURES, (), counters.adapter_failures)
    yield Value(ADAPTER_FETCHES, (), counters.adapter_fetches)
    yield Value(TRANSFERRED, ("export",), counters.kv_exported)
    yield Value(TRANSFERRED, ("import",), counters.kv_imported)
    yield from (Value(ENDED, (reason,), n) for reason, n in dict(counters.ended).items())
    yield from (Value(IMPORTS_REFUSED, (code,), n) for code, n in dict(counters.kv_refused).items())
    while counters.step_s:
        yield Value(STEPS, (), counters.step_s.popleft())
    while counters.adapter_waits_s:
        yield Value(ADAPTER_WAITS, (), counters.adapter_waits_s.popleft())
    while counters.lengths:
        prompt, output = counters.lengths.popleft()
        yield Value(INPUT_LENGTH, ("total_input_tokens",), prompt)
        yield Value(OUTPUT_LENGTH, ("total_output_tokens",), output)
