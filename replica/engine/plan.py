"""Defines the data between scheduler and backend: the plan and the output of a step.

A step's rows of logits have this order, on which backends and `replica.engine.sampler` rely:

1. `plan.decode`, in order, 1 + len(draft) rows per sequence. The first row is for the token after
   the last token. Each other row is for the token after one token of the draft, and is valid if the
   draft is right up to that token.
2. Parts of `plan.prefill` that end their prompt, in order, with one row each. A sequence and its
   forks share the row.
3. Parts of `plan.prefill` that need logprobs of their prompt, in order, with the rows of
   `logprob_rows`. These rows do not include the row of the prompt's last token, which is already
   in the second group.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from replica.engine.speculation import DRAFT_TOKENS_MAX, PredictedText, PromptLookup
from replica.engine.types import (
    NO_DRAFTS,
    URGENT_PRIORITY,
    DraftCounts,
    PromptLogprobs,
    Score,
    SequenceRequest,
    TokenLogprobs,
)

NO_SLOT = -1


class ScheduledSequence:
    """A living sequence. Backends read its `tokens`, `computed`, `blocks`, `slot` and `request`.

    Attributes:
        tokens: Ids of the prompt and of the emitted tokens. In an array, a long prompt is copied
            and hashed without a look at its ids.
        computed: Number of leading tokens whose KV values are in the pool.
        blocks: Blocks that the sequence uses, in the order of its tokens.
        slot: Slot of its adapter while the sequence runs, or NO_SLOT without an adapter.
        scratch: Data that the backend stores for the sequence.
        sampler: Data that the sampler stores for the sequence, or None before the first sampling.
        leader: Sibling that computes the prompt for this waiting sequence, or None.
        forks: Siblings that wait until this sequence has computed the prompt.
        scored: Number of prompt tokens, from the first on, that need no logprob any more. Their
            logprobs were reported, are not requested, or are undefined, as for the first token.
        drafter: Source of drafts, or None if the sequence uses no drafts.
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
        """Create a waiting sequence. With a leader, it waits to share the leader's prompt."""
        self.request = request
        self.arrival = arrival
        self.root = root
        self.stop_ids = stop_ids
        self.tokens: array[int]
        self.tokens = array("I", request.prompt) if leader is None else leader.tokens
        self.prompt_tokens = len(self.tokens)
        self.tokens_max = self.prompt_tokens + request.output_tokens_max
        self.computed = 0
        self.blocks: list[int] = []
        self.capacity = 0  # number of tokens that fit into `blocks`
        self.hashes = list(request.hashes)
        self.slot = NO_SLOT
        self.ended = False
        self.admitted_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.scratch = 0
        self.sampler: Any = None
        self.leader: ScheduledSequence | None = None
        self.forks: list[ScheduledSequence] = []
        self.scored = self.prompt_tokens - request.scored_tokens if request.scored_tokens else 1
        # sums of the logprobs and of the entropies of the scored tokens so far
        self.scores = (0.0, 0.0)
        self.drafter: PromptLookup | None = None
        width, prediction = request.draft_tokens_max, None
        # A sequence with a grammar uses no drafts, because every wrong draft would require a
        # rollback of its matcher.
        if (width or request.prediction) and request.sampling.grammar is None:
            if request.prediction:
                answer_from = self.prompt_tokens - request.resumed_tokens
                prediction = PredictedText(request.prediction, answer_from, DRAFT_TOKENS_MAX)
            sibling = None if leader is None else leader.drafter
            self.drafter = PromptLookup(width, self.prompt_tokens, sibling, prediction)

    def score(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Add the logprobs and entropies of further scored tokens to the sums."""
        logprobs, entropies = self.scores
        logprobs += sum([token.logprob for token in tokens])
        self.scores = logprobs, entropies + sum([token.entropy for token in tokens])

    @property
    def final_score(self) -> Score | None:
        """Means over the scored tokens. None if there are none, or not all are computed yet."""
        count = self.request.scored_tokens
        if not count or self.scored < self.prompt_tokens:
            return None
        logprobs, entropies = self.scores
        return Score(logprobs / count, entropies / count)

    def logprob_rows(self, count: int) -> range:
        """Return the rows of a prompt part that determine the logprobs of prompt tokens.

        The row of a position predicts the token after that position. The row of the last token is
        used for sampling instead.

        Args:
            count: Number of tokens of the part, which begins at `computed`.
        """
        if self.request.prompt_logprobs < 0:
            return range(0)
        end = count - (self.computed + count == len(self.tokens))
        return range(min(end, max(0, self.scored - 1 - self.computed)), end)

    @property
    def is_urgent(self) -> bool:
        """Whether the sequence is a probe, which is admitted at once."""
        return self.request.priority >= URGENT_PRIORITY

    @property
    def output_tokens(self) -> int:
        """Number of emitted tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefill_s(self) -> float:
        """Seconds from the first scheduling to the first token, or 0 before the first token."""
        begun, first = self.admitted_at_s, self.first_token_at_s
        if begun is None or first is None or not self.output_tokens:
            return 0.0
        return first - begun

    @property
    def drafts(self) -> DraftCounts:
        """Counts of the sequence's speculated tokens."""
        return NO_DRAFTS if self.drafter is None else self.drafter.counts

    def rank(self) -> tuple[int, int]:
        """Return the sort key of importance. The most important sequence has the least key."""
        return (-self.request.priority, self.arrival)


class Adapter(Protocol):
    """A LoRA adapter in the backend's form."""

    @property
    def rank(self) -> int:
        """Rank of the adapter's matrices."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes that the adapter occupies in host memory."""
        ...


class StepPlan:
    """The sequences and tokens that one step computes.

    Attributes:
        decode: Sequences whose last token is computed. Their draft is also computed, if any.
        prefill: Sequences, each with the number of tokens to compute after `computed`.
        sampled: Sequences with new tokens, in the order of the backend's output. The sequences of
            `decode` are first. Then follow those of `prefill` whose prompt ends, each followed by
            its forks.
        fork_of: Index of a fork in `sampled` -> index of the sequence whose row of logits the fork
            shares.
        drafts: Index into `decode` -> ids to try after the last token, for sequences with a draft.
        loads: Pairs of a slot and the adapter to copy into the slot before the computation.
        copies: Pairs (source, target) of blocks to copy after the computation. A source is the
            unfinished last block of a prompt, and each of its forks has a target.
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
        """Number of tokens that this step computes."""
        drafted = sum(map(len, self.drafts.values()))
        return len(self.decode) + drafted + sum(count for _, count in self.prefill)


@dataclass(slots=True)
class StepOutput:
    """The result of a computed step. Every index refers to `plan.sampled`.

    Attributes:
        tokens: The first new token of each sampled sequence.
        more: Index -> additional tokens after the first, if tokens of a draft were right.
        logprobs: Index -> one entry per new token, for sequences that requested logprobs.
        prompt_logprobs: Logprobs of prompt parts computed in this step.
        failed: Index -> reason why the sequence cannot continue. Its tokens of this step are
            dropped.
        refused: Index of a sequence that failed because of its request -> request field at fault,
            for example the grammar. The sequence would fail on every replica.
    """

    tokens: list[int] = field(default_factory=list[int])
    more: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    refused: dict[int, str] = field(default_factory=dict[int, str])
