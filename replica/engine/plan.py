"""The interface between scheduler and backend: plans of steps, and their output.

A backend computes; it knows nothing of queues and pools. The rows of logits of a step have one
order, which backends and `replica.engine.sampler` share:

1. `plan.decode`, in order: 1 + len(draft) rows each, for the token after the last one and, if the
   draft is right so far, for the one after each of its tokens;
2. parts of `plan.prefill` whose last token is computed, in order: one row, shared by their forks;
3. parts of `plan.prefill` that want logprobs of their prompt, in order: `logprob_rows`, which the
   row of the last of all its tokens is none of (it is of the second kind).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from replica.engine.speculation import DRAFT_TOKENS_MAX, PredictedText, PromptLookup
from replica.engine.types import (
    NO_DRAFTS,
    URGENT_PRIORITY,
    Capabilities,
    DraftCounts,
    PromptLogprobs,
    Score,
    SequenceRequest,
    TokenLogprobs,
)

NO_SLOT = -1


class ScheduledSequence:
    """A living sequence. Backends read `tokens`, `computed`, `blocks`, `slot` and `request`.

    Attributes:
        tokens: Prompt and emitted ids.
        computed: Leading tokens whose KV values are in the pool.
        blocks: Held blocks, in the order of the tokens.
        slot: Slot of its adapter, while it runs; NO_SLOT for the base.
        scratch: Backend's own data, for the life of the sequence.
        sampler: Sampler's own data; None at first.
        leader: The sequence whose prompt this one waits for, to be forked from it.
        forks: Siblings that wait for this one's prompt.
        scored: Leading prompt tokens whose logprobs were reported, are not wanted or, as the
            first, have none.
        drafter: Source of drafts; None: no drafts.
    """

    __slots__ = (
        "admitted_at_s",
        "arrival",
        "blocks",
        "capacity",
        "computed",
        "drafter",
        "ended",
        "first_token_at_s",
        "forks",
        "hashes",
        "leader",
        "prompt_tokens",
        "request",
        "root",
        "sampler",
        "scored",
        "scores",
        "scratch",
        "slot",
        "stop_ids",
        "tokens",
        "tokens_max",
    )

    def __init__(
        self,
        request: SequenceRequest,
        arrival: int,
        root: bytes,
        stop_ids: frozenset[int],
        leader: "ScheduledSequence | None" = None,
    ) -> None:
        """Make a waiting sequence; with a leader it shares the computed prompt."""
        self.request = request
        self.arrival = arrival
        self.root = root
        self.stop_ids = stop_ids
        self.tokens = list(request.prompt) if leader is None else leader.tokens
        self.prompt_tokens = len(self.tokens)
        self.tokens_max = self.prompt_tokens + request.output_tokens_max
        self.computed = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that `blocks` hold
        self.hashes: list[bytes] = []
        self.slot = NO_SLOT
        self.ended = False
        self.admitted_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.scratch = 0
        self.sampler: Any = None
        self.leader: ScheduledSequence | None = None
        self.forks: list[ScheduledSequence] = []
        self.scored = self.prompt_tokens - request.scored_tokens if request.scored_tokens else 1
        self.scores = (0.0, 0.0)  # sums of what is scored: of logprobs, of entropies
        self.drafter: PromptLookup | None = None
        width, prediction = request.draft_tokens_max, None
        # A grammar's matcher would have to be rolled back after each wrong draft.
        if (width or request.prediction) and request.sampling.grammar is None:
            if request.prediction:
                answer_from = self.prompt_tokens - request.resumed_tokens
                prediction = PredictedText(request.prediction, answer_from, DRAFT_TOKENS_MAX)
            sibling = None if leader is None else leader.drafter
            self.drafter = PromptLookup(width, self.prompt_tokens, sibling, prediction)

    def score(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Take the scores of further tokens."""
        logprobs, entropies = self.scores
        logprobs += sum([token.logprob for token in tokens])
        self.scores = logprobs, entropies + sum([token.entropy for token in tokens])

    @property
    def final_score(self) -> Score | None:
        """Score of the scored tokens; None: none, or not all of them are computed."""
        count = self.request.scored_tokens
        if not count or self.scored < self.prompt_tokens:
            return None
        logprobs, entropies = self.scores
        return Score(logprobs / count, entropies / count)

    def logprob_rows(self, count: int) -> range:
        """Return the rows of a prompt part that are needed for the log probabilities of its tokens.

        The row of a position is about the next one; that of the last token is sampled from.

        Args:
            count: Tokens of the part, from `computed` on.
        """
        if self.request.prompt_logprobs < 0:
            return range(0)
        end = count - (self.computed + count == len(self.tokens))
        return range(min(end, max(0, self.scored - 1 - self.computed)), end)

    @property
    def is_urgent(self) -> bool:
        """Whether it is a probe, which does not wait."""
        return self.request.priority >= URGENT_PRIORITY

    @property
    def output_tokens(self) -> int:
        """Number of emitted tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefill_s(self) -> float:
        """Seconds from the first scheduling to the first token; 0 without one."""
        begun, first = self.admitted_at_s, self.first_token_at_s
        if begun is None or first is None or not self.output_tokens:
            return 0.0
        return first - begun

    @property
    def drafts(self) -> DraftCounts:
        """Counts of speculated tokens."""
        return NO_DRAFTS if self.drafter is None else self.drafter.counts

    def rank(self) -> tuple[int, int]:
        """Order of importance, most important first."""
        return (-self.request.priority, self.arrival)


class Adapter(Protocol):
    """A LoRA adapter in the backend's form."""

    @property
    def rank(self) -> int:
        """Rank of its matrices."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes in host memory."""
        ...


@runtime_checkable
class ResizableBackend(Protocol):
    """A backend whose KV memory can be freed and allocated again."""

    def allocated(self, blocks: int) -> Any:
        """Return KV memory for this many blocks; slow, any thread may call."""
        ...

    def use(self, memory: Any) -> None:
        """Compute with that memory from now on; the content of the previous one is lost."""
        ...


class StepPlan:
    """The sequences and tokens that one step computes.

    Attributes:
        decode: Sequences whose last token, and draft if there is one, are computed.
        prefill: Sequences with the number of tokens to compute after `computed`.
        sampled: Sequences that get new tokens, in the order in which the backend returns them:
            `decode`, then those of `prefill` whose last token is computed, each followed by its
            forks.
        fork_of: Index into `sampled` of a fork -> index of the sequence whose row it shares.
        drafts: Index into `decode` -> ids to try after the last token. Most have none.
        loads: Slots and adapters to load before the computation.
        copies: Pairs (from, to) of blocks to copy after the computation: the unfinished last block
            of a prompt, for its forks.
    """

    __slots__ = ("copies", "decode", "drafts", "fork_of", "loads", "prefill", "sampled")

    def __init__(
        self,
        decode: list[ScheduledSequence],
        prefill: list[tuple[ScheduledSequence, int]],
        sampled: list[ScheduledSequence] | None = None,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        if sampled is None:
            ended = [s for s, count in prefill if s.computed + count == len(s.tokens)]
            sampled = decode + ended
        self.sampled = sampled
        self.fork_of: dict[int, int] = {}
        self.drafts: dict[int, list[int]] = {}
        self.loads: list[tuple[int, Adapter]] = []
        self.copies: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        drafted = sum(map(len, self.drafts.values()))
        return len(self.decode) + drafted + sum(count for _, count in self.prefill)


@dataclass(slots=True)
class StepOutput:
    """The result of a computed step; indices are into `plan.sampled`.

    Attributes:
        tokens: The first new token of each sampled sequence.
        more: Index -> the tokens behind the first, where a draft was right.
        logprobs: Index -> one entry per new token, for the sequences that asked.
        prompt_logprobs: Logprobs of prompt parts computed in this step.
        failed: Index -> reason why the sequence cannot go on; its tokens of this step do not count.
        refused: Indices of `failed` whose request is the reason, with the field at fault, e.g. its
            grammar is stuck: they would fail again wherever they are tried.
    """

    tokens: list[int] = field(default_factory=list[int])
    more: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    refused: dict[int, str] = field(default_factory=dict[int, str])


class StepFailedError(RuntimeError):
    """A backend could not compute a step; its sequences may be retried elsewhere."""


class Backend(Protocol):
    """A backend that computes steps, without queues and pools."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the backend, constant."""
        ...

    @property
    def block_layout(self) -> str:
        """The layout of a KV block's bytes, in words; empty when it cannot export them."""
        ...

    def check_request(self, request: SequenceRequest) -> None:
        """Check what only the backend can judge, above all that a grammar compiles.

        Called before a sequence is taken, so that a bad one costs its sender an error and no other
        sequence a step: in the step thread, and before that perhaps in another one, because a
        grammar may take long. A compiled one should be cached: the sequence comes next.

        Raises:
            RefusedError: The request cannot be computed; nothing was taken.
        """
        ...

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan.

        Raises:
            StepFailedError: No part of the plan was computed.
        """
        ...

    def read_adapter(self, digest: str, directory: Path) -> Adapter:
        """Read and check an adapter, in any thread; RefusedError when it cannot be served."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of KV blocks."""
        ...

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Replace the contents of KV blocks."""
        ...
