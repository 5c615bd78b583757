"""Data between an engine host and a driver: requests, events and states.

`replica.engine.driver` has the interface itself. Keys are chosen by the caller, unique among living
sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sluice.errors import ErrorCode

# Sequences of this priority or above are admitted at once; only for probes of health.
URGENT_PRIORITY = 1 << 31


class Finish(IntEnum):
    """The reason why a sequence ended; the numbers are those of `FinishReason` on the wire."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    REFUSED = 4
    BUSY = 5
    FAILED = 6


class GrammarKind(StrEnum):
    """The syntax of a grammar."""

    JSON = "json"  # any JSON object; the text is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # the text is a JSON array of strings
    EBNF = "ebnf"  # in Lark's syntax


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar that an answer must match. Equal grammars are compiled once."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a sequence; `replica.engine.sampling` defines their order.

    Attributes:
        temperature: Temperature; 0 is greedy, without limits on probability.
        top_p: Smallest set of tokens whose probability reaches this; 1 is off.
        top_k: Most probable tokens to keep; 0 is off.
        min_p: Least probability, as a share of that of the most probable token; 0 is off.
        seed: Seed. A token depends on (seed, position, logits) alone, so the batch has no
            influence, and a sequence that is resumed elsewhere goes on as it would have here.
        presence_penalty: Penalty on the logit of every emitted token.
        frequency_penalty: Penalty of a token, times the number of its occurrences.
        repetition_penalty: Penalty that divides positive and multiplies negative logits of tokens
            in the prompt or the output; 1 is off.
        logit_bias: Pairs of a token and the addition to its logit, at most one per token.
        tokens_min: Number of emitted tokens before any end-of-sequence or stop token.
        logprobs: Alternatives to report per token; 0 reports the token's own alone, -1 nothing.
        grammar: Grammar that the answer must match; None: any text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    tokens_min: int = 0
    logprobs: int = -1
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """A sibling of a sequence: same prompt, computed once, and an answer of its own.

    Attributes:
        key: Key of the sibling in events.
        seed: Seed in place of the sequence's own.
    """

    key: int
    seed: int


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A sequence to generate, with its siblings.

    Attributes:
        key: Key of the sequence in events.
        prompt: Token ids.
        output_tokens_max: Largest number of output tokens; at least 1.
        stop_token_ids: Ids that end the sequence, besides the model's own end-of-sequence ids.
        sampling: Sampling parameters.
        cache_root: Root of the prefix cache, 16 bytes (`sluice.hashing.cache_root`), or empty for
            the base's own root.
        adapter_digest: Digest of the adapter; empty for the base.
        priority: Priority; higher goes first, and is preempted last.
        ignore_eos: Whether only `output_tokens_max` and a cancel end it; for benchmarks.
        submitted_at_s: Time of its arrival at the host, by the driver's clock.
        forks: Siblings (n > 1). Each is admitted and ends with events of its own; logprobs of the
            prompt are reported once, under the key of the one that computes it.
        resumed_tokens: Number of trailing tokens of the prompt that an earlier attempt emitted:
            penalties, `tokens_min` and the grammar count them as output.
        prompt_logprobs: Alternatives to report per prompt token; -1 reports nothing. The prompt is
            computed in full then, whatever is cached.
        draft_tokens_max: Most speculated tokens per step by prompt lookup; 0: by the engine's
            option. The answer is the same.
        prediction: Expected answer, whose tokens are proposed where the answer follows it.
        pinned_blocks: Number of leading blocks of the prompt that stay in the cache for `PIN_S`
            from the first token on, as far as the pool has room for pinned ones.
        scored_tokens: Number of trailing tokens of the prompt that are scored and not reported one
            by one; `prompt_logprobs` is 0 then, and only these are computed in full.
        trace: W3C trace context, for engines that make spans of their own: headers by name.
    """

    key: int
    prompt: Sequence[int]
    output_tokens_max: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    cache_root: bytes = b""
    adapter_digest: str = ""
    priority: int = 0
    ignore_eos: bool = False
    submitted_at_s: float = 0.0
    forks: tuple[Fork, ...] = ()
    resumed_tokens: int = 0
    prompt_logprobs: int = -1
    draft_tokens_max: int = 0
    prediction: Sequence[int] = ()
    scored_tokens: int = 0
    pinned_blocks: int = 0
    trace: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine beyond plain sampling; other requests are refused.

    Attributes:
        adapter_slots: Adapters in one batch; 0: none can be served.
        adapter_rank_max: Largest rank of one adapter.
        logprobs_max: Alternatives per token; 0: no logprobs at all.
        has_prompt_logprobs: Whether it reports logprobs of the prompt's tokens.
        has_penalties: Whether it has penalties, bias, min_p and tokens_min.
        has_grammars: Whether it has constrained answers.
        has_drafts: Whether it has speculative decoding by prompt lookup.
        has_kv_transfer: Whether it exports and imports blocks.
        rereads_adapters: Whether the files of adapters in host memory are read again and must stay.
        has_scores: Whether it scores given answers.
    """

    adapter_slots: int = 0
    adapter_rank_max: int = 0
    logprobs_max: int = 0
    has_prompt_logprobs: bool = False
    has_penalties: bool = False
    has_grammars: bool = False
    has_drafts: bool = False
    has_kv_transfer: bool = False
    rereads_adapters: bool = False
    has_scores: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity of an engine.

    Attributes:
        context_tokens_max: Most tokens of prompt and output of one sequence together.
        sequences_max: Most running sequences; more wait.
        step_tokens_max: Most tokens per step, at least `sequences_max`, so that every running
            sequence can advance in every step. Prompts and probes may exceed it by a little.
        kv_blocks: Number of blocks of `sluice.hashing.BLOCK_TOKENS` tokens.
        vocabulary: Number of token ids: 0 .. vocabulary - 1.
    """

    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    vocabulary: int

    def __post_init__(self) -> None:
        """Refuse limits under which an engine could stand still."""
        smallest = min(self.context_tokens_max, self.sequences_max, self.kv_blocks, self.vocabulary)
        if smallest < 1 or self.step_tokens_max < self.sequences_max:
            raise ValueError(
                f"{self}: every limit must be at least 1, and step_tokens_max at least"
                " sequences_max; correct the engine options"
            )


@dataclass(frozen=True, slots=True)
class AdmittedEvent:
    """A sequence was scheduled for the first time.

    Attributes:
        key: Key of the sequence.
        queue_s: Seconds from the submission until now.
        cached_tokens: Prompt tokens whose KV values were found in the prefix cache.
    """

    key: int
    queue_s: float
    cached_tokens: int


class DraftCounts(NamedTuple):
    """Counts of speculated tokens, and of the accepted ones.

    Attributes:
        tried: Proposed and computed tokens.
        accepted: Accepted tokens.
        prediction_tried: Proposed tokens from the caller's prediction.
        prediction_accepted: Accepted tokens from the caller's prediction.
    """

    tried: int = 0
    accepted: int = 0
    prediction_tried: int = 0
    prediction_accepted: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of given tokens under the model's own distribution: means in nats."""

    logprob: float
    entropy: float


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A sequence ended; no event follows.

    Attributes:
        key: Key of the sequence.
        reason: Reason of the end.
        code: Code of `sluice.errors`; for REFUSED, BUSY and FAILED.
        message: Text for operators and clients.
        prompt_tokens: Length of the prompt.
        output_tokens: Number of emitted tokens.
        prefill_s: Seconds from the first scheduling to the first token; 0 without one.
        param: Field at fault, see `RefusedError`; for REFUSED.
        drafts: Draft counts of the sequence alone.
        score: Score of `SequenceRequest.scored_tokens`, if there are any and the engine reports it.
    """

    key: int
    reason: Finish
    code: str = ""
    message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0
    param: str = ""
    drafts: DraftCounts = NO_DRAFTS
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution, before anything that sampling changes.

    Attributes:
        key: Key of the sequence.
        logprob: Logprob of the token itself.
        top: (token, logprob) of the most probable ones, best first.
        entropy: Entropy of the distribution, where tokens are scored.
    """

    key: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens, each given those before; the very first has none.

    Attributes:
        key: Key of the sequence.
        first: Position of the first token covered, at least 1.
        tokens: One entry per token; their `key` is that of the sequence.
    """

    key: int
    first: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class StepEvents:
    """Events of one step.

    Attributes:
        keys: Column of keys; several tokens of one sequence stand in their order.
        tokens: Column of tokens; the new token of `keys[i]`.
        has_runs: Whether a sequence may appear more than once.
        logprobs: One entry per token of the sequences that asked for them, in the columns' order.
        prompt_logprobs: Logprobs of prompt parts computed in this step.
        admitted: Admitted sequences, in order.
        finished: Finished sequences, in order; their tokens of this step are in the columns.
        kv: Block hash -> whether it is now cached (True: stored, False: removed). The last word on
            each hash; order does not matter.
    """

    keys: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    has_runs: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    admitted: list[AdmittedEvent] = field(default_factory=list[AdmittedEvent])
    finished: list[FinishedEvent] = field(default_factory=list[FinishedEvent])
    kv: dict[bytes, bool] = field(default_factory=dict[bytes, bool])


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine after its last step.

    Attributes:
        running: Sequences that hold KV blocks.
        waiting: Sequences without KV blocks, among them preempted ones.
        kv_blocks_used: Blocks held by sequences; cached unused ones count as free.
        prefill_tokens_owed: Prompt tokens that are accepted and not yet computed, as if no block
            were cached.
        step_s: Duration of the last step.
        preemptions: Number of preemptions since the start.
        prompt_tokens: Prompt tokens admitted since the start.
        cached_tokens: Admitted prompt tokens that were found in the prefix cache.
        kv_blocks_pinned: Cached blocks that may not be evicted now.
        draft_tokens: Speculated tokens since the start.
        accepted_tokens: Accepted draft tokens since the start.
        adapters_resident: Digests in slots, sorted; the same object until they change.
        prefilling: Running sequences whose prompt is not computed yet.
        step_prompt_tokens: Prompt tokens computed in the last step.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    prefill_tokens_owed: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv_blocks_pinned: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    adapters_resident: tuple[str, ...] = ()
    prefilling: int = 0
    step_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that an engine holds.

    Attributes:
        digest: Digest of its artifact.
        is_in_slot: Whether it is in a slot, for use by a batch; else it is in host memory.
        rank: Rank of its matrices.
        memory_bytes: Bytes in host memory.
        sequences: Number of living sequences with this adapter.
        prompt_tokens: Prompt tokens computed or found in the cache for it, since the engine
            started.
        output_tokens: Output tokens with it, since the engine started.
        loads: Number of loads into a slot.
    """

    digest: str
    is_in_slot: bool
    rank: int
    memory_bytes: int
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    loads: int = 0


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Contents of cached KV blocks, for the transfer between engines.

    Attributes:
        layout: Layout of a block's bytes: types and shapes, in words. Engines with equal layouts
            and equal
            bases can use one another's blocks.
        hashes: Names of the blocks, in the order of their chain.
        data: One array of bytes per block, all of the same length.
    """

    layout: str
    hashes: tuple[bytes, ...]
    data: tuple[bytes, ...]


class RefusedError(ValueError):
    """The sequence cannot be served by this engine; a retry does not help.

    Attributes:
        code: Error code.
        message: Text for operators and clients.
        param: Field of `SequenceRequest` or `Sampling` at fault; empty: unknown.
    """

    def __init__(self, code: ErrorCode, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
