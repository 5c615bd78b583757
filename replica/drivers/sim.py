"""Simulates an engine without weights, whose steps last as long as a cost model computes.

This is the driver `sim`. Scheduling, KV blocks, prefix cache, adapters, preemption and limits are
those of the real engine. Only logits and KV values are missing. Token ids are ordinary words of the
artifact's vocabulary. Each id is a hash of the adapter and of all ids before it. So a sequence that
resumes elsewhere continues with the same ids, and drafts can be verified. Sampling parameters have
no effect except for the seed. Unless the temperature is 0, the seed selects the first token of an
answer, and thus all later tokens.
"""

import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
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
from replica.engine.backend import StepFailedError
from replica.engine.core import ScheduledEngine
from replica.engine.plan import Adapter, ScheduledSequence, StepOutput, StepPlan
from replica.engine.scheduler import EngineScheduler
from replica.engine.types import Capabilities, Limits, RefusedError, SequenceRequest
from sluice.adapter_ranks import adapter_room
from sluice.errors import ErrorCode
from sluice.hashing import cache_root

if TYPE_CHECKING:
    from array import array

_ROOM = adapter_room("sim")

log = logging.getLogger(__name__)

_ANY_BASE = BaseFacts(vocabulary=32_000, context_tokens=8192, eos_ids=frozenset())
_MASK = (1 << 32) - 1
# 2^32 / golden ratio. Multiplication by it spreads similar CRCs over all words.
_MIXER = 0x9E3779B1
_BLOCK = bytes(16)  # the empty content of a KV block
_CUSTOM = "custom"
_CUSTOM_SIZE = EngineSize(blocks=65_536, step_tokens_max=4096, sequences_max=2048)
# Bytes per rank of a simulated adapter. An adapter of rank 8 for all seven projections of 32 layers
# of an 8B model has 66 MB in 16 bits.
_RANK_BYTES = 66_000_000 // 8


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of the driver `sim`, set by SLUICE_ENGINE_OPTIONS.

    The default constants resemble an 8B model in FP8 on one GPU with 8 TB/s of memory. A step takes
    2 ms to launch its kernels and to read 8 GB of weights. Prefill computes 250,000 tokens/s, and
    attention takes 8 ns to read the 64 KiB of KV values per token of context. With 1,000 sequences,
    the engine generates about 180,000 tokens/s. The figures are invented for tests.

    Attributes:
        blocks: Number of blocks of the KV pool, each of 32 tokens, or 0 for the cost model's
            number.
        step_tokens_max: Largest number of tokens per step, or 0 for the cost model's number.
        sequences_max: Largest number of running sequences, or 0 for the cost model's number.
        context_tokens_max: Largest number of tokens of a sequence, or 0 for the base's own limit.
        speed: Divisor of every duration, for example 2 for an engine twice as fast.
        cost: Name of a cost model of `sim_costs`: custom, h70, m8, or a GPU and a model.
        cost_step_s: Seconds that each step takes in any case. The cost model `custom` uses this
            constant and the next three.
        cost_decode_row_s: Additional seconds of a step per sequence that decodes.
        cost_prefill_token_s: Additional seconds of a step per prompt token that is computed.
        cost_context_token_s: Additional seconds of a step per token that is attended to.
        noise: Standard deviation of the logarithm of a random factor on each step. The factor's
            mean is 1.
        seed: Seed of the noise.
        wake_s: Seconds that a sleeping engine needs to wake.
        adapter_slots: Number of adapters in one batch.
        adapter_rank: Largest rank of an adapter.
        adapter_memory_bytes: Largest number of bytes of all adapters in host memory.
        adapter_read_s: Seconds to read an adapter from disk to host memory. The platform assumes
            about 1 s from NVMe.
        adapter_load_s: Seconds by which a step is longer if it copies an adapter from host memory
            to a slot. The platform assumes about 50 ms.
        faults: Fault plan of `sim_faults`, which begins when the engine starts.
        faults_file: Path of a file with a fault plan. Every change of the file begins a new plan.
        steps_file: Path of a file to which each step appends the time of its end, in seconds of the
            monotonic clock. A client can subtract it from the time when the tokens arrive.
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
    adapter_slots: int = _ROOM.slots
    adapter_rank: int = _ROOM.rank
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
    """Return the work of a plan in the units of cost models."""
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
    """Generates token ids, waits for the time of a step, and fails according to its fault plan."""

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
        # number of next steps that must fail, number of next sequences that receive a wrong token
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
        """The capabilities: adapters, drafts and KV transfer, but no logprobs."""
        return Capabilities(
            adapter_slots=self._options.adapter_slots,
            adapter_rank_max=self._options.adapter_rank if self._options.adapter_slots else 0,
            has_drafts=True,
            has_kv_transfer=True,
        )

    def check_request(self, request: SequenceRequest) -> None:
        """Accept every request. Limits and capabilities have been checked before."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute the next ids, and return them after the duration of the step."""
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
        """Read the rank from adapter_config.json, without the weights."""
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
        """Wait as long as an allocation takes, and return the number of blocks."""
        if blocks >= self._blocks:
            self._sleep(self._options.wake_s / self._options.speed)
        return blocks

    def use(self, memory: int) -> None:
        """Do nothing, because there are no KV values."""

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks, which are all zeros."""
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
        """Accept a draft up to its first wrong token, and emit the correct token after it."""
        token = output.tokens[index]
        for tried in draft:
            if tried != token:
                break
            sequence.scratch = crc32(self._words[token], sequence.scratch)
            (token,) = self._tokens([sequence.scratch])
            output.more.setdefault(index, []).append(token)

    def _suffer(self) -> float:
        """Apply the faults that are due, and return the seconds by which the step is delayed."""
        now_s = self._clock()
        self._steps += 1
        if self._file is not None:
            try:
                faults = self._file.read()
            except (OSError, ValueError) as error:
                # a mistake in the file is logged, and the engine continues
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

        If no pause precedes a step, the step begins at the end of the previous step. So the host's
        time between steps costs nothing, as on a GPU that computes asynchronously.
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


def _state(tokens: "array[int]", adapter_digest: str) -> int:
    """Return a hash of a sequence's tokens and adapter. It determines the next id."""
    return crc32(tokens, crc32(adapter_digest.encode()))


def _seeded(state: int, sequence: ScheduledSequence) -> int:
    """Return the state that selects the next token. For the first token it includes the seed."""
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
    """Return a simulated engine for the base in `directory`, whose weights are not read.

    Without a directory, the engine simulates a base with 32,000 ids and 8,192 tokens of context.

    Args:
        directory: Directory of the base.
        base_digest: Digest of the base.
        options: Fields of `SimOptions`.
        clock: Clock in seconds, for example the virtual clock of a simulation.
        sleep: Function that sleeps for a number of seconds of the clock.
        die: Function for the fault `die`. A simulation passes one that does not exit.

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
