"""Counts the work of an engine host since its start, in totals that the metrics read."""

from collections import Counter, deque
from dataclasses import dataclass, field

# Largest number of observations stored between two reads of the metrics. More replace the oldest.
_KEPT = 1024


@dataclass(slots=True)
class HostCounters:
    """Totals since the start of the host.

    Attributes:
        steps: Number of engine steps.
        output_tokens: Tokens emitted for routers and probes.
        ended: Number of ended sequences by finish reason, in lower case.
        grammars: Number of sequences with a grammar.
        adapter_loads: Number of loads of adapters into slots.
        adapter_evictions: Number of evictions of adapters from slots.
        adapter_failures: Number of adapters that could not be read or stored in memory.
        adapter_fetches: Number of requests to the node's agent for missing adapters.
        adapter_waits_s: Seconds that each sequence waited for its adapter, stored until the
            metrics read them.
        kv_exported: Number of exported blocks.
        kv_imported: Number of imported blocks that the cache stored or already had.
        kv_refused: Number of refused imports by error code.
        step_s: Seconds of each step, stored until the metrics read them.
        lengths: Pairs (prompt tokens, output tokens) of the sequences that ended with STOP or
            LENGTH, stored until the metrics read them.
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
