"""An engine whose model is a hash of its KV cache: a wrong block or adapter changes its answers."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from replica.engine.adapter_table import AdapterTable
from replica.engine.backend import StepFailedError
from replica.engine.core import ScheduledEngine
from replica.engine.plan import NO_SLOT, ScheduledSequence, StepOutput, StepPlan
from replica.engine.scheduler import EngineScheduler
from replica.engine.types import (
    Capabilities,
    Limits,
    PromptLogprobs,
    SequenceRequest,
    TokenLogprobs,
)
from sluice.hashing import BLOCK_TOKENS

ROOT = b"r" * 16
VOCABULARY = 200
EOS = 7


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that changes every KV value by its number."""

    number: int
    rank: int = 4
    memory_bytes: int = 100


class MemoryBackend:
    """A model whose KV cache is real memory, so that a wrong block or adapter changes the output.

    It writes each token id, changed by the number of the adapter in the slot, into the blocks of
    the sequence. The next token is a hash of the values that it reads from these blocks.
    """

    block_layout = "32 ids"

    def __init__(self, blocks: int, slots: int) -> None:
        self.capabilities = Capabilities(
            adapter_slots=slots,
            adapter_rank_max=8,
            logprobs_max=5,
            has_prompt_logprobs=True,
            has_penalties=True,
            has_grammars=True,
            has_drafts=True,
            has_kv_transfer=True,
            has_scores=True,
        )
        self.memory = [[-1] * BLOCK_TOKENS for _ in range(blocks)]
        self.slots: list[NamedAdapter | None] = [None] * slots
        self.failing: dict[int, str] = {}  # key -> reason why the sequence cannot continue
        self.blames_requests = False
        self.plans: list[StepPlan] = []
        self.is_broken = False

    def check_request(self, request: SequenceRequest) -> None:
        del request

    def read_adapter(self, digest: str, directory: Path) -> NamedAdapter:
        del directory
        return NamedAdapter(int(digest, 16))

    def run(self, plan: StepPlan) -> StepOutput:
        if self.is_broken:
            raise StepFailedError("out of luck")
        self.plans.append(plan)
        for slot, adapter in plan.loads:
            assert isinstance(adapter, NamedAdapter)
            self.slots[slot] = adapter
        output = StepOutput()
        for index, sequence in enumerate(plan.decode):
            self._write(sequence, [sequence.tokens[-1], *plan.drafts.get(index, [])])
        for sequence, count in plan.prefill:
            self._write(sequence, sequence.tokens[sequence.computed : sequence.computed + count])
            self._score_prompt(sequence, count, output)
        for source, target in plan.copies:
            self.memory[target] = self.memory[source].copy()
        for index, sequence in enumerate(plan.sampled):
            self._sample(index, sequence, plan.drafts.get(index, []), output)
        return output

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return [array("q", self.memory[block]).tobytes() for block in blocks]

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        for block, content in zip(blocks, data, strict=True):
            self.memory[block] = array("q", content).tolist()

    def _write(self, sequence: ScheduledSequence, ids: Sequence[int]) -> None:
        # The KV value of the last possible token is never needed, and may have no position.
        assert sequence.computed + len(ids) < sequence.tokens_max
        number = 0
        if sequence.slot != NO_SLOT:
            adapter = self.slots[sequence.slot]
            assert adapter is not None
            number = adapter.number
        for position, token in enumerate(ids, sequence.computed):
            block = sequence.blocks[position // BLOCK_TOKENS]
            self.memory[block][position % BLOCK_TOKENS] = marked(token, number)

    def _read(self, sequence: ScheduledSequence, count: int) -> list[int]:
        values: list[int] = []
        for block in sequence.blocks:
            values += self.memory[block]
        return values[:count]

    def _sample(
        self, index: int, sequence: ScheduledSequence, draft: list[int], output: StepOutput
    ) -> None:
        count = len(sequence.tokens)
        values = self._read(sequence, count + len(draft))
        seed = sequence.request.sampling.seed
        tokens = [next_token(values[:count], seed)]
        for offset, tried in enumerate(draft):
            if tried != tokens[-1]:
                break
            tokens.append(next_token(values[: count + offset + 1], seed))
        output.tokens.append(tokens[0])
        if len(tokens) > 1:
            output.more[index] = tokens[1:]
        if sequence.request.sampling.logprobs >= 0:
            output.logprobs[index] = [
                TokenLogprobs(sequence.request.key, logprob(values[: count + i], token))
                for i, token in enumerate(tokens)
            ]
        if sequence.request.key in self.failing:
            output.failed[index] = self.failing[sequence.request.key]
            if self.blames_requests:
                output.refused[index] = "grammar"

    def _score_prompt(self, sequence: ScheduledSequence, count: int, output: StepOutput) -> None:
        end = min(sequence.computed + count, len(sequence.request.prompt) - 1)
        if sequence.request.prompt_logprobs < 0 or end <= sequence.computed:
            return
        values = self._read(sequence, end)
        tokens = tuple(
            TokenLogprobs(
                sequence.request.key, logprob(values[: row + 1], sequence.tokens[row + 1])
            )
            for row in range(sequence.computed, end)
        )
        first = sequence.computed + 1
        output.prompt_logprobs.append(PromptLogprobs(sequence.request.key, first, tokens))


def marked(token: int, adapter: int) -> int:
    return token | adapter << 32


def next_token(values: list[int], seed: int) -> int:
    """Return mostly the successor of the last value's previous occurrence, for good drafts."""
    mixed = crc32(array("q", values).tobytes(), seed)
    if mixed % 8 > 1:
        for index in range(len(values) - 2, -1, -1):
            if values[index] == values[-1]:
                return values[index + 1] & 0xFFFF
    return (mixed >> 8) % VOCABULARY


def logprob(values: list[int], token: int) -> float:
    return -(crc32(array("q", [*values, token]).tobytes()) % 1000) / 100


class Clock:
    """A clock whose time advances only during a sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


class MemoryEngine(ScheduledEngine):
    """An engine with a `MemoryBackend`."""

    def __init__(
        self, scheduler: EngineScheduler, backend: MemoryBackend, clock: Callable[[], float]
    ) -> None:
        super().__init__("memory", scheduler, backend, clock)
        self.backend = backend


def memory_engine(
    *,
    blocks: int = 64,
    sequences: int = 8,
    step_tokens: int = 64,
    context: int = 1000,
    slots: int = 2,
    adapter_memory_bytes: int = 500,
    prefix_cache: bool = True,
    clock: Callable[[], float] | None = None,
) -> MemoryEngine:
    """Return an idle engine."""
    limits = Limits(context, sequences, step_tokens, blocks, VOCABULARY)
    scheduler = EngineScheduler(
        limits,
        root=ROOT,
        eos_ids=frozenset({EOS}),
        prefix_cache=prefix_cache,
        adapters=AdapterTable(slots, adapter_memory_bytes),
    )
    return MemoryEngine(scheduler, MemoryBackend(blocks, slots), clock or Clock())
