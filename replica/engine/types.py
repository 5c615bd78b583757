"""Defines the data between an engine host and a driver: requests, events and states.

`replica.engine.driver` defines the methods. The host chooses the key of each sequence, and no two
living sequences may have equal keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sluice.errors import ErrorCode

# Lowest priority that is admitted at once. Only health probes have such a priority.
URGENT_PRIORITY = 1 << 31


class Finish(IntEnum):
    """The reason why a sequence ended. The numbers are those of `FinishReason` on the wire."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    REFUSED = 4
    BUSY = 5
    FAILED = 6


class GrammarKind(StrEnum):
    """The syntax of a grammar."""

    JSON = "json"  # any JSON object, and the text of the grammar is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # one of several strings, which the text lists as a JSON array
    EBNF = "ebnf"  # a grammar in Lark's syntax


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match. Equal grammars are compiled once."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a sequence. `replica.engine.sampling` defines their order.

    Attributes:
        temperature: Temperature. 0 is greedy decoding, which ignores top_p, top_k and min_p.
        top_p: Probability mass of the smallest set of tokens to sample from. 1 means all tokens.
        top_k: Number of the most probable tokens to sample from. 0 means all tokens.
        min_p: Least probability of a token, as a share of the greatest probability. 0 means all
            tokens.
        seed: Seed of the random numbers. A token depends only on (seed, position, logits). So other
            sequences have no influence, and a sequence that another replica resumes continues with
            the same tokens.
        presence_penalty: Penalty that is subtracted from the logit of every emitted token.
        frequency_penalty: Penalty that is subtracted once for each occurrence of an emitted token.
        repetition_penalty: Factor for tokens in the prompt or the output. A positive logit is
            divided by it, and a negative logit is multiplied by it. 1 has no effect.
        logit_bias: Pairs of a token and the value added to its logit, at most one pair per token.
        tokens_min: Number of tokens to emit before an end-of-sequence or stop token is permitted.
        logprobs: Number of alternatives to report per token. 0 reports only the token's own
            logprob, and -1 reports no logprob.
        grammar: Grammar that the answer must match, or None without a constraint.
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
    """A sibling of a sequence. Both share the prompt's computation, but have separate answers.

    Attributes:
        key: Key of the sibling in events.
        seed: Seed of the sibling, used instead of the sequence's seed.
    """

    key: int
    seed: int


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A sequence to generate, with its siblings.

    Attributes:
        key: Key of the sequence in events.
        prompt: Token ids.
        output_tokens_max: Largest number of output tokens, at least 1.
        stop_token_ids: Ids that end the sequence, besides the model's own end-of-sequence ids.
        sampling: Sampling parameters.
        cache_root: Root of the prefix cache, 16 bytes (`sluice.hashing.cache_root`), or empty for
            the root of the base.
        adapter_digest: Digest of the adapter, or empty for the base.
        priority: Priority. Sequences with a higher priority are scheduled first and preempted last.
        ignore_eos: Whether end-of-sequence and stop ids do not end the sequence. Benchmarks use
            this for answers of a fixed length.
        submitted_at_s: Time when the sequence arrived at the host, by the driver's clock.
        forks: Siblings (n > 1). Each sibling has its own admission and end events. Logprobs of the
            prompt are reported once, under the key of the sequence that computes the prompt.
        resumed_tokens: Number of trailing prompt tokens that an earlier attempt emitted. Penalties,
            `tokens_min` and the grammar treat them as output.
        prompt_logprobs: Number of alternatives to report per prompt token, or -1 to report nothing.
            Unless it is -1, the whole prompt is computed, even if parts of it are cached.
        draft_tokens_max: Largest number of tokens that prompt lookup speculates per step, or 0 for
            the engine's default. Speculation does not change the answer.
        prediction: Expected answer. Its tokens are the drafts as long as the answer follows it.
        pinned_blocks: Number of prompt blocks, from the first on, that stay in the cache for
            `PIN_S` after the first token. The pool limits the total of all pinned blocks.
        scored_tokens: Number of last prompt tokens whose mean logprob is computed.
            `prompt_logprobs` must then be 0. The tokens before the scored ones may be cached.
        hashes: Hashes of the first full blocks of the prompt, which are then not computed again.
        trace: W3C trace context as headers by name, for engines that emit spans.
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
    hashes: Sequence[bytes] = ()
    trace: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of an engine that not every engine has.

    A request that needs a missing feature is refused.

    Attributes:
        adapter_slots: Number of adapters that fit into one batch, or 0 if the engine serves no
            adapters.
        adapter_rank_max: Largest rank of one adapter.
        logprobs_max: Largest number of alternatives per token, or 0 if the engine reports no
            logprobs.
        has_prompt_logprobs: Whether the engine reports logprobs of the prompt's tokens.
        has_penalties: Whether the engine supports penalties, logit bias, min_p and tokens_min.
        has_grammars: Whether the engine can constrain answers by a grammar.
        has_drafts: Whether the engine supports speculative decoding by prompt lookup.
        has_kv_transfer: Whether the engine exports and imports KV blocks.
        rereads_adapters: Whether the engine reads an adapter's files again later. The files must
            then stay on disk while the adapter is in host memory.
        has_scores: Whether the engine scores given answers.
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
        context_tokens_max: Largest number of prompt and output tokens of one sequence together.
        sequences_max: Largest number of running sequences. Further sequences wait.
        step_tokens_max: Largest number of tokens per step. It is at least `sequences_max`, so that
            every running sequence can advance in every step. Tokens reserved for prompts, and
            probes, may exceed it slightly.
        kv_blocks: Number of KV blocks, of `sluice.hashing.BLOCK_TOKENS` tokens each.
        vocabulary: Number of token ids. Valid ids are 0 .. vocabulary - 1.
    """

    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    vocabulary: int

    def __post_init__(self) -> None:
        """Raise ValueError for limits under which the engine could not make progress."""
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
        queue_s: Seconds from the submission to the admission.
        cached_tokens: Prompt tokens whose KV values were found in the prefix cache.
    """

    key: int
    queue_s: float
    cached_tokens: int


class DraftCounts(NamedTuple):
    """Counts of speculated tokens and of the accepted tokens among them.

    Attributes:
        tried: Tokens that were proposed and computed.
        accepted: Tokens of `tried` that were accepted.
        prediction_tried: Tokens of `tried` that came from the client's prediction.
        prediction_accepted: Tokens of `prediction_tried` that were accepted.
    """

    tried: int = 0
    accepted: int = 0
    prediction_tried: int = 0
    prediction_accepted: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Score:
    """The mean logprob and entropy, in nats, of given tokens under the model's own distribution."""

    logprob: float
    entropy: float


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A sequence ended. This is the last event with its key.

    Attributes:
        key: Key of the sequence.
        reason: Reason of the end.
        code: Code of `sluice.errors`, set for REFUSED, BUSY and FAILED.
        message: Text for operators and clients.
        prompt_tokens: Length of the prompt.
        output_tokens: Number of emitted tokens.
        prefill_s: Seconds from the first scheduling to the first token, or 0 if no token was
            emitted.
        param: Request field at fault, as in `RefusedError`, set for REFUSED.
        drafts: Counts of this sequence's speculated tokens.
        score: Score of the `SequenceRequest.scored_tokens`. None if the request has none, or the
            engine reports no score.
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
    """Logprobs of one token, by the model's own distribution before sampling parameters change it.

    Attributes:
        key: Key of the sequence.
        logprob: Logprob of the token itself.
        top: Pairs (token, logprob) of the most probable tokens, best first.
        entropy: Entropy of the distribution in nats, set only for scored tokens.
    """

    key: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens. Each depends on all tokens before it.

    Attributes:
        key: Key of the sequence.
        first: Position of the first token in `tokens`, at least 1, because position 0 has no
            logprob.
        tokens: One entry per prompt token, whose `key` is the sequence's key.
    """

    key: int
    first: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class StepEvents:
    """Events of one step.

    Attributes:
        keys: Column of sequence keys. A sequence with several tokens appears once per token.
        tokens: Column of tokens. `tokens[i]` is a new token of the sequence `keys[i]`, and the
            tokens of one sequence are in their order.
        has_runs: Whether a sequence may appear more than once in the columns.
        logprobs: One entry per token of the sequences that requested logprobs, in the order of
            the columns.
        prompt_logprobs: Logprobs of prompt parts computed in this step.
        admitted: Sequences admitted in this step, in order.
        finished: Sequences that finished in this step, in order. The columns include their last
            tokens.
        kv: Block hash -> whether the block is now cached (True if stored, False if removed). Only
            the last change of each hash is included, so the order does not matter.
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
        running: Number of sequences that hold KV blocks.
        waiting: Number of sequences without KV blocks, including preempted ones.
        kv_blocks_used: Number of blocks that sequences use. Cached blocks that no sequence uses
            count as free.
        prefill_tokens_owed: Prompt tokens of accepted sequences that are not computed yet. Tokens
            in the prefix cache count, too.
        step_s: Duration of the last step.
        preemptions: Number of preemptions since the start.
        prompt_tokens: Prompt tokens of all sequences admitted since the start.
        cached_tokens: Part of `prompt_tokens` that was found in the prefix cache.
        kv_blocks_pinned: Number of pinned blocks, which must not be evicted now.
        draft_tokens: Speculated tokens since the start.
        accepted_tokens: Speculated tokens that were accepted since the start.
        adapters_resident: Digests of the adapters in slots, sorted. The tuple object changes only
            with its content.
        prefilling: Number of running sequences whose prompt is not completely computed yet.
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
    """An adapter that is in an engine's host memory, and perhaps also in a slot.

    Attributes:
        digest: Digest of the adapter's artifact.
        is_in_slot: Whether the adapter is in a slot, where a batch can use it. Otherwise it is only
            in host memory.
        rank: Rank of the adapter's matrices.
        memory_bytes: Bytes in host memory.
        sequences: Number of living sequences with this adapter.
        prompt_tokens: Prompt tokens of this adapter's sequences that were computed or found in the
            cache since the engine started.
        output_tokens: Output tokens generated with this adapter since the engine started.
        loads: Number of times that the adapter was loaded into a slot.
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
    """Contents of cached KV blocks that one engine sends to another.

    Attributes:
        layout: Description of the types and shapes of a block's bytes. Engines with equal layouts
            and equal bases can exchange blocks.
        hashes: Hashes that name the blocks, in the order of their chain.
        data: One array of bytes per block, all of the same length.
    """

    layout: str
    hashes: tuple[bytes, ...]
    data: tuple[bytes, ...]


class RefusedError(ValueError):
    """A sequence cannot be served by this engine, and a retry on the same engine does not help.

    Attributes:
        code: Error code.
        message: Text for operators and clients.
        param: Field of `SequenceRequest` or `Sampling` at fault, or empty if unknown.
    """

    def __init__(self, code: ErrorCode, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
