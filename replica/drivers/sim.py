"""Driver `sim`: an engine without weights, whose steps take the time that a cost model says.

Scheduling, KV blocks, prefix cache, preemption and limits are the real ones; only the values are
missing. Token ids are ordinary words of the artifact's vocabulary: each is a hash of all ids before
it, so a sequence that is resumed elsewhere goes on with the same ids.
"""

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from replica.drivers.options import parse_options
from replica.engine.artifact import BaseFacts, ordinary_token_ids, read_base_facts
from replica.engine.core import ScheduledEngine
from replica.engine.plan import StepOutput, StepPlan
from replica.engine.scheduler import Scheduler
from replica.engine.types import Limits
from sluice.hashing import cache_root

_ANY_BASE = BaseFacts(vocabulary=32_000, context_tokens=8192, eos_ids=frozenset())
_MASK = (1 << 32) - 1
_MIXER = 0x9E3779B1  # 2^32 / golden ratio: a CRC alone is linear, neighbours would look alike


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What SLUICE_ENGINE_OPTIONS may set.

    The costs are seconds of one step and are added up. The defaults resemble an 8B model in FP8 on
    one GPU with 8 TB/s of memory, rounded: a step launches its kernels and reads 8 GB of weights
    (2 ms), prefill computes 250,000 tokens/s, attention reads 64 KiB of KV values per token of
    context (8 ns). 1,000 sequences give about 180,000 tokens/s. An invention for tests and load,
    not a claim about any machine.

    Attributes:
        context_tokens_max: 0: as the base says.
        speed: Divides every duration; 2 is an engine twice as fast.
        cost_step_s: Of every step.
        cost_decode_row_s: Of every sequence that decodes.
        cost_prefill_token_s: Of every prompt token that is computed.
        cost_context_token_s: Of every token that is attended to.
    """

    blocks: int = 65536
    step_tokens_max: int = 4096
    sequences_max: int = 2048
    context_tokens_max: int = 0
    prefix_cache: bool = True
    speed: float = 1.0
    cost_step_s: float = 2e-3
    cost_decode_row_s: float = 2e-6
    cost_prefill_token_s: float = 4e-6
    cost_context_token_s: float = 8e-9

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step."""
        context = sum([sequence.computed for sequence in plan.decode])
        prefill = 0
        for sequence, count in plan.prefill:
            prefill += count
            context += sequence.computed
        cost = (
            self.cost_step_s
            + self.cost_decode_row_s * len(plan.decode)
            + self.cost_prefill_token_s * prefill
            + self.cost_context_token_s * context
        )
        return cost / self.speed


class SimBackend:
    """Makes token ids, and lets the time of a step pass."""

    def __init__(
        self,
        options: SimOptions,
        token_ids: list[int],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._options = options
        self._token_ids = token_ids
        self._clock = clock
        self._sleep = sleep
        self._ended_at_s = float("-inf")

    def run(self, plan: StepPlan) -> StepOutput:
        """Return the next ids after the step's duration."""
        for sequence, _ in plan.prefill:
            sequence.scratch = crc32(array("i", sequence.tokens).tobytes())
        for sequence in plan.decode:
            sequence.scratch = crc32(sequence.tokens[-1].to_bytes(4, "little"), sequence.scratch)
        ids = self._token_ids
        count = len(ids)
        tokens = [
            ids[((sequence.scratch * _MIXER) & _MASK) * count >> 32] for sequence in plan.sampled
        ]
        self._pass_time(self._options.step_time_s(plan))
        return StepOutput(tokens)

    def _pass_time(self, cost_s: float) -> None:
        """Sleep until the step is over.

        In a row of steps each begins when the one before ended, so that the time that we and the
        host spend between them is hidden, as it is when a GPU computes.
        """
        now_s = self._clock()
        is_busy = now_s - self._ended_at_s < cost_s
        ends_at_s = (self._ended_at_s if is_busy else now_s) + cost_s
        if ends_at_s > now_s:
            self._sleep(ends_at_s - now_s)
        self._ended_at_s = ends_at_s


def load_sim(
    directory: Path | None,
    base_digest: str,
    options: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ScheduledEngine:
    """Return the engine for the base in `directory`; its weights are not read.

    Without a directory: any base of 32,000 ids and 8,192 tokens of context.

    Raises:
        OptionsError: An option is unknown or of the wrong type.
        ArtifactError: config.json is missing or incomplete.
    """
    chosen = parse_options(SimOptions, options)
    facts = _ANY_BASE if directory is None else read_base_facts(directory)
    limits = Limits(
        context_tokens_max=chosen.context_tokens_max or facts.context_tokens,
        sequences_max=chosen.sequences_max,
        step_tokens_max=chosen.step_tokens_max,
        kv_blocks=chosen.blocks,
        vocabulary=facts.vocabulary,
    )
    root = cache_root(base_digest, "", b"")
    scheduler = Scheduler(
        limits, root=root, eos_ids=facts.eos_ids, prefix_cache=chosen.prefix_cache
    )
    token_ids = list(range(facts.vocabulary))
    if directory is not None:
        token_ids = ordinary_token_ids(directory, facts.vocabulary)
    backend = SimBackend(chosen, token_ids, clock, sleep)
    return ScheduledEngine("sim", scheduler, backend, clock)
