"""Counts of an engine host since its start; written by the step loop, read by metrics."""

from collections import Counter, deque
from dataclasses import dataclass, field

_KEPT = 1024  # steps, and ends, between two looks; of more the oldest are lost


@dataclass(slots=True)
class HostCounters:
    """Sums since the start.

    Attributes:
        steps: Engine steps.
        output_tokens: Tokens emitted for routers and probes.
        ended: Sequences by finish reason, in lower case.
        grammars: Sequences with a grammar.
        adapter_loads: Loads into slots.
        adapter_evictions: Evictions out of slots.
        adapter_failures: Adapters that could not be read or put into memory.
        adapter_fetches: Requests to the node for missing adapters.
        adapter_waits_s: Waits of sequences for their adapters in seconds, as a histogram like
            `step_s`.
        kv_exported: Exported blocks.
        kv_imported: Imported blocks that the cache took or had.
        kv_refused: Refused imports by code.
        step_s: Durations of the last steps, until a reader takes them.
        lengths: (prompt tokens, output tokens) of sequences that ended by themselves, until a
            reader takes them.
    """

    steps: int = 0
    output_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    grammars: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_failures: int = 0
    adapter_fetches: int = 0
    adapter_waits_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))
    kv_exported: int = 0
    kv_imported: int = 0
    kv_refused: Counter[str] = field(default_factory=Counter[str])
    step_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))
    lengths: deque[tuple[int, int]] = field(
        default_factory=lambda: deque[tuple[int, int]](maxlen=_KEPT)
    )
