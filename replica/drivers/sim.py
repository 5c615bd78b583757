"""The driver `sim`: an engine without weights, whose steps take the time of a cost model.

Scheduling, KV blocks, prefix cache, adapters, preemption and limits are those of the real engine;
only the values are missing. Token ids are ordinary words of the artifact's vocabulary. Each id is a
hash of the adapter and of all ids before it, so a sequence that resumes elsewhere continues with
the same ids, and drafts can be verified. Of the sampling parameters only the seed has an influence:
unless the temperature is 0, the first token of an answer depends on the seed, and so do all later
tokens.
"""

import logging
import os
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zlib import crc32

from replica.drivers.options import OptionsError, parse_options
from replica.drivers.sim_costs import (
    MODELS_BY_NAME,
    CostModel,
    EngineSize,
    LinearCost,
    StepWork,
)
from replica.drivers.sim_faults import FaultFile, FaultKind, FaultPlan, parse_faults
from replica.engine.adapter_table import AdapterTable
from replica.engine.artifact import (
    ArtifactError,
    BaseFacts,
    ordinary_token_ids,
    read_base_facts,
    read_json,
)
from replica.engine.core import ScheduledEngine
from replica.engine.plan import Adapter, ScheduledSequence, StepFailedError, StepOutput, StepPlan
from replica.engine.scheduler import EngineScheduler
from replica.engine.types import Capabilities, Limits, RefusedError, SequenceRequest
from sluice.adapter_ranks import SIM
from sluice.errors import ErrorCode
from sluice.hashing import cache_root

log = logging.getLogger(__name__)

_ANY_BASE = BaseFacts(vocabulary=32_000, context_tokens=8192, eos_ids=frozenset())
_MASK = (1 << 32) - 1
# 2^32 / golden ratio; a CRC alone is linear, so similar sequences would get similar ids
_MIXER = 0x9E3779B1
_BLOCK = bytes(16)  # the empty content of a KV block
_CUSTOM = "custom"
_CUSTOM_SIZE = EngineSize(blocks=65_536, step_tokens_max=4096, sequences_max=2048)
# Bytes per rank of a simulated adapter: rank 8 of an 8B model in 16 bits, all seven projections of
# 32 layers, as the platform's sizing assumes (66 MB).
_RANK_BYTES = 66_000_000 // 8


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of the driver `sim`, set by SLUICE_ENGINE_OPTIONS.

    The defaults of the constants resemble an 8B model in FP8 on one GPU with 8 TB/s of memory,
    rounded: a step launches its kernels and reads 8 GB of weights (2 ms), prefill computes 250,000
    tokens/s, attention reads 64 KiB of KV values per token of context (8 ns). 1,000 sequences give
    about 180,000 tokens/s. An invention for tests and load, not a claim about any machine.

    Attributes:
        blocks: Blocks of the KV pool, 32 tokens each; 0: by the cost model.
        step_tokens_max: Most tokens per step; 0: by the cost model.
        sequences_max: Most running sequences; 0: by the cost model.
        context_tokens_max: Most tokens of a sequence; 0: the base's own limit.
        speed: Divisor of every duration; 2 is an engine twice as fast.
        cost: Name of a cost model of `sim_costs`: custom, h70, m8, or a GPU and a model.
        cost_step_s: Seconds of every step. This and the next three are for the cost model `custom`.
        cost_decode_row_s: Seconds of every sequence that decodes.
        cost_prefill_token_s: Seconds of every prompt token that is computed.
        cost_context_token_s: Seconds of every token that is attended to.
        noise: Standard deviation of the logarithm of a factor on each step; its mean is 1.
        seed: Seed of the noise.
        wake_s: Seconds that a sleeping engine takes to wake.
        adapter_slots: Adapters in one batch.
        adapter_rank: Largest rank of an adapter.
        adapter_memory_bytes: Most bytes of all adapters in host memory.
        adapter_read_s: Seconds from disk to host memory. The platform assumes about 1 s from NVMe.
        adapter_load_s: Seconds from host memory to a slot, in a step. The platform assumes about 50
            ms.
        faults: Plan of `sim_faults`, from the start on.
        faults_file: Path of a file with such a plan; every change of it is a new plan.
        steps_file: Path of a file that gets a line for each step: when it ended, in seconds of the
            monotonic clock. A client's later time was added on the way.
    """

    blocks: int = 0
    step_tokens_max: int = 0
    sequences_max: int = 0
    context_tokens_max: int = 0
    prefix_cache: bool = True
    speed: float = 1.0
    cost: str = _CUSTOM
    cost_step_s: float = 2e-3
    cost_decode_row_s: float = 2e-6
    cost_prefill_token_s: float = 4e-6
    cost_context_token_s: float = 8e-9
    noise: float = 0.0
    seed: int = 0
    wake_s: float = 1.0
    adapter_slots: int = SIM.slots
    adapter_rank: int = SIM.rank
    adapter_memory_bytes: int = 16 << 30
    adapter_read_s: float = 1.0
    adapter_load_s: float = 0.05
    faults: str = ""
    faults_file: str = ""
    steps_file: str = ""


def choose_cost(options: SimOptions) -> CostModel:
    """Return the cost model that the options name. Raises OptionsError if there is none."""
    if options.cost == _CUSTOM:
        return LinearCost(
            _CUSTOM_SIZE,
            step=options.cost_step_s,
            decode_row=options.cost_decode_row_s,
            prefill_token=options.cost_prefill_token_s,
            context_token=options.cost_context_token_s,
        )
    model = MODELS_BY_NAME.get(options.cost)
    if model is None:
        raise OptionsError(
            f"engine option cost is {options.cost!r}; known are {_CUSTOM},"
            f" {', '.join(MODELS_BY_NAME)}"
        )
    usual = SimOptions()
    for item in fields(SimOptions):
        if item.name.startswith("cost_") and getattr(options, item.name) != getattr(
            usual, item.name
        ):
            raise OptionsError(f"engine option {item.name} needs cost={_CUSTOM}")
    return model


def measure(plan: StepPlan) -> StepWork:
    """Return the work of a plan, as cost models measure it."""
    tokens = context = 0
    pairs = 0.0
    for sequence, count in plan.prefill:
        tokens += count
        context += sequence.computed
        pairs += count * (sequence.computed + count / 2)
    return StepWork(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        prefill_context=context,
        decode_tokens=len(plan.decode) + sum(map(len, plan.drafts.values())),
        decode_context=sum([sequence.computed for sequence in plan.decode]),
        adapter_loads=len(plan.loads),
    )


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """An adapter whose weights are not read."""

    rank: int
    memory_bytes: int


class SimBackend:
    """Generates token ids, lets the time of a step pass, and fails as its fault plan says."""

    block_layout = f"sim {len(_BLOCK)} bytes"

    def __init__(
        self,
        options: SimOptions,
        cost: CostModel,
        token_ids: list[int],
        vocabulary: int,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        die: Callable[[], None],
    ) -> None:
        self._options = options
        self._cost = cost
        self._blocks = options.blocks or cost.size.blocks
        self._token_ids = token_ids
        self._words = [token.to_bytes(4, "little") for token in range(vocabulary)]
        self._clock = clock
        self._sleep = sleep
        self._die = die
        self._random = random.Random(options.seed)  # noqa: S311 - noise, not secrets
        self._steps = 0
        # steps yet to fail, sequences yet to get a wrong token
        self._failures = self._corruptions = 0
        self._ended_at_s = float("-inf")
        try:
            self._faults = FaultPlan(parse_faults(options.faults), clock(), 1)
        except ValueError as error:
            raise OptionsError(f"engine option faults: {error}") from None
        self._file = FaultFile(Path(options.faults_file)) if options.faults_file else None
        self._ends = Path(options.steps_file) if options.steps_file else None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities: adapters, drafts and KV transfer, but no probabilities."""
        return Capabilities(
            adapter_slots=self._options.adapter_slots,
            adapter_rank_max=self._options.adapter_rank if self._options.adapter_slots else 0,
            has_drafts=True,
            has_kv_transfer=True,
        )

    def check_request(self, request: SequenceRequest) -> None:
        """Accept every request; limits and capabilities are already checked."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Return the next ids after the duration of the step."""
        stalled_s = self._suffer()
        cost_s = self._duration_s(plan) + stalled_s
        if self._failures:
            self._failures -= 1
            self._pass_time(stalled_s)
            raise StepFailedError("a step failed on command (sim fault)")
        words = self._words
        for sequence in plan.decode:
            sequence.scratch = crc32(words[sequence.tokens[-1]], sequence.scratch)
        for sequence in plan.sampled[len(plan.decode) :]:
            sequence.scratch = _state(sequence.tokens, sequence.request.adapter_digest)
        states = [sequence.scratch for sequence in plan.sampled]
        for index in range(len(plan.decode), len(states)):
            states[index] = _seeded(states[index], plan.sampled[index])
        output = StepOutput(self._tokens(states))
        for index, draft in plan.drafts.items():
            self._verify(plan.decode[index], index, draft, output)
        for index in range(min(self._corruptions, len(output.tokens))):
            wrong = self._token_ids[0]
            output.tokens[index] = wrong if wrong != output.tokens[index] else self._token_ids[-1]
        self._corruptions = 0 if output.tokens else self._corruptions
        self._pass_time(cost_s)
        return output

    def read_adapter(self, digest: str, directory: Path) -> Adapter:
        """Read the rank from adapter_config.json; the weights are not read."""
        try:
            rank = read_json(directory / "adapter_config.json").get("r")
        except ArtifactError as error:
            raise RefusedError(ErrorCode.ADAPTER_INVALID, str(error)) from None
        limit = self._options.adapter_rank
        if not isinstance(rank, int) or not 0 < rank <= limit:
            raise RefusedError(
                ErrorCode.ADAPTER_INVALID,
                f"adapter {digest[:12]}: r in adapter_config.json is {rank!r}; 1 to {limit} are"
                " served",
            )
        self._sleep(self._options.adapter_read_s / self._options.speed)
        return SimAdapter(rank, rank * _RANK_BYTES)

    def allocated(self, blocks: int) -> int:
        """Return the number of blocks after the time that an allocation would take."""
        if blocks >= self._blocks:
            self._sleep(self._options.wake_s / self._options.speed)
        return blocks

    def use(self, memory: int) -> None:
        """Do nothing, because there are no KV values."""

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks, which are empty."""
        return [_BLOCK] * len(blocks)

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Do nothing, because token ids depend only on earlier ids."""

    def _tokens(self, states: list[int]) -> list[int]:
        ids = self._token_ids
        count = len(ids)
        return [ids[((state * _MIXER) & _MASK) * count >> 32] for state in states]

    def _verify(
        self, sequence: ScheduledSequence, index: int, draft: list[int], output: StepOutput
    ) -> None:
        """Accept the correct part of a draft, and emit one token after it."""
        token = output.tokens[index]
        for tried in draft:
            if tried != token:
                break
            sequence.scratch = crc32(self._words[token], sequence.scratch)
            (token,) = self._tokens([sequence.scratch])
            output.more.setdefault(index, []).append(token)

    def _suffer(self) -> float:
        """Apply the faults that are due; return the seconds for which the step stalls."""
        now_s = self._clock()
        self._steps += 1
        if self._file is not None:
            try:
                faults = self._file.read()
            except (OSError, ValueError) as error:
                # a mistake in the file must not stop the engine
                log.warning("faults_file_refused: %s", error)
            else:
                if faults is not None:
                    self._faults = FaultPlan(faults, now_s, self._steps)
        stalled_s = 0.0
        for fault in self._faults.take(now_s, self._steps):
            if fault.kind is FaultKind.STALL:
                stalled_s += fault.amount
            elif fault.kind is FaultKind.DIE:
                self._die()
            elif fault.kind is FaultKind.CORRUPT:
                self._corruptions = max(1, int(fault.amount))
            elif fault.kind is FaultKind.FAIL:
                self._failures = max(1, int(fault.amount))
        return stalled_s

    def _duration_s(self, plan: StepPlan) -> float:
        options = self._options
        work = measure(plan)
        cost_s = self._cost.step_s(work) + work.adapter_loads * options.adapter_load_s
        if options.noise:
            # A lognormal factor has mean 1 if its logarithm is centred at -sigma^2 / 2.
            cost_s *= self._random.lognormvariate(-(options.noise**2) / 2, options.noise)
        return cost_s * self._faults.factor(self._clock()) / options.speed

    def _pass_time(self, cost_s: float) -> None:
        """Sleep until the end of the step.

        Consecutive steps begin when the previous step ended, so that the time between steps is
        hidden, as on a GPU that computes asynchronously.
        """
        now_s = self._clock()
        is_busy = now_s - self._ended_at_s < cost_s
        ends_at_s = (self._ended_at_s if is_busy else now_s) + cost_s
        if ends_at_s > now_s:
            self._sleep(ends_at_s - now_s)
        self._ended_at_s = ends_at_s
        if self._ends is not None:
            with self._ends.open("a") as file:
                file.write(f"{self._clock():.6f}\n")


def _state(tokens: list[int], adapter_digest: str) -> int:
    """Return the hash of a sequence, the state from which its next id follows."""
    return crc32(array("i", tokens).tobytes(), crc32(adapter_digest.encode()))


def _seeded(state: int, sequence: ScheduledSequence) -> int:
    """Return the state that chooses the next token, mixed with the seed for a first sampled token.

    The sequence's own state does not change, so that it depends only on the ids.
    """
    request = sequence.request
    emitted = len(sequence.tokens) - sequence.prompt_tokens + request.resumed_tokens
    if emitted or request.sampling.temperature == 0:
        return state
    return crc32(repr(request.sampling.seed).encode(), state)


def _exit_at_once() -> None:
    log.error("engine_killed: on command (sim fault)")
    os._exit(1)


def load_sim(
    directory: Path | None,
    base_digest: str,
    options: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    die: Callable[[], None] = _exit_at_once,
) -> ScheduledEngine:
    """Return the engine for the base in `directory`, whose weights are not read.

    Without a directory, the engine simulates a base with 32,000 ids and 8,192 tokens of context.

    Args:
        directory: Directory of the base.
        base_digest: Digest of the base.
        options: Fields of `SimOptions`.
        clock: Clock in seconds; in a simulation, the simulated clock.
        sleep: Function that lets the clock advance.
        die: Effect of the fault `die`; a simulation passes a function that does not exit.

    Raises:
        OptionsError: An option is unknown, of the wrong type, or impossible.
        ArtifactError: config.json is missing or incomplete.
    """
    chosen = parse_options(SimOptions, options)
    if not chosen.speed > 0 or not 0 <= chosen.noise <= 1:
        raise OptionsError(f"speed {chosen.speed} must be above 0, noise {chosen.noise} in 0..1")
    cost = choose_cost(chosen)
    facts = _ANY_BASE if directory is None else read_base_facts(directory)
    limits = Limits(
        context_tokens_max=chosen.context_tokens_max or facts.context_tokens,
        sequences_max=chosen.sequences_max or cost.size.sequences_max,
        step_tokens_max=chosen.step_tokens_max or cost.size.step_tokens_max,
        kv_blocks=chosen.blocks or cost.size.blocks,
        vocabulary=facts.vocabulary,
    )
    token_ids = list(range(facts.vocabulary))
    if directory is not None:
        token_ids = ordinary_token_ids(directory, facts.vocabulary)
    backend = SimBackend(
        chosen, cost, token_ids, facts.vocabulary, clock=clock, sleep=sleep, die=die
    )
    root = cache_root(base_digest, "", b"")
    scheduler = EngineScheduler(
        limits,
        root=root,
        eos_ids=facts.eos_ids,
        prefix_cache=chosen.prefix_cache,
        adapters=AdapterTable(chosen.adapter_slots, chosen.adapter_memory_bytes),
    )
    return ScheduledEngine("sim", scheduler, backend, clock)
