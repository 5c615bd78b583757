"""What an engine host and a driver say to each other: the one interface behind which engines live.

A driver owns sequences from `add` until their `FinishedEvent`. It is driven by `step()` from one
thread and never calls back. Keys are chosen by the caller, unique among living sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from sluice.errors import ErrorCode

# Sequences of this priority or above are admitted at once; only for probes of health.
URGENT_PRIORITY = 1 << 31


class Finish(IntEnum):
    """Why a sequence ended; the numbers are those of `FinishReason` on the wire."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    REFUSED = 4
    BUSY = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: temperature, then top_k, then top_p, then one draw.

    Attributes:
        temperature: 0 is greedy, and the rest is ignored.
        top_p: Smallest set of tokens whose probability reaches this; 1 is off.
        top_k: Most probable tokens to keep; 0 is off.
        seed: A token depends on (seed, position, logits) alone, so the batch has no influence, and
            a sequence that is resumed elsewhere goes on as it would have here.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate.

    Attributes:
        key: Names the sequence in events.
        prompt: Token ids.
        output_tokens_max: At least 1.
        stop_token_ids: End the sequence, besides the model's own end-of-sequence ids.
        sampling: See there.
        cache_root: 16 bytes (`sluice.hashing.cache_root`), or empty for the base's own root.
        adapter_digest: Empty for the base.
        priority: Higher goes first, and is preempted last.
        ignore_eos: Only `output_tokens_max` and a cancel end it; for benchmarks.
        submitted_at_s: When the host saw it, by the driver's clock.
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold.

    Attributes:
        context_tokens_max: Prompt and output of one sequence together.
        sequences_max: Running at once; more wait.
        step_tokens_max: Tokens computed per step, at least `sequences_max`, so that every running
            sequence can move in every step. Prompts and probes may exceed it by a little.
        kv_blocks: Blocks of `sluice.hashing.BLOCK_TOKENS` tokens.
        vocabulary: Valid token ids are 0 .. vocabulary - 1.
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
        key: The sequence.
        queue_s: Submitted -> now.
        cached_tokens: Prompt tokens whose KV values were found in the prefix cache.
    """

    key: int
    queue_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A sequence ended; nothing follows.

    Attributes:
        key: The sequence.
        reason: See `Finish`.
        code: Of `sluice.errors`; for REFUSED, BUSY and FAILED.
        message: For people.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens emitted.
        prefill_s: First scheduled -> first token; 0 when there was none.
    """

    key: int
    reason: Finish
    code: str = ""
    message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0


@dataclass(slots=True)
class StepEvents:
    """What one step brought.

    Attributes:
        keys: Column; a sequence appears at most once per step.
        tokens: Column; the new token of `keys[i]`.
        admitted: In order.
        finished: In order; their tokens of this step are in the columns.
        kv: Block hash -> whether it is now cached (True: stored, False: removed). The last word on
            each hash; order does not matter.
    """

    keys: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    admitted: list[AdmittedEvent] = field(default_factory=list[AdmittedEvent])
    finished: list[FinishedEvent] = field(default_factory=list[FinishedEvent])
    kv: dict[bytes, bool] = field(default_factory=dict[bytes, bool])


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, after its last step.

    Attributes:
        running: Sequences that hold KV blocks.
        waiting: Sequences that do not, among them preempted ones.
        kv_blocks_used: Held by sequences; cached ones that nobody holds count as free.
        prefill_tokens_owed: Accepted and not yet computed, as if nothing were cached.
        step_s: Duration of the last step.
        preemptions: Since the start.
        prompt_tokens: Admitted since the start.
        cached_tokens: Of these, found in the prefix cache.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    prefill_tokens_owed: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RefusedError(ValueError):
    """The sequence cannot be served by this engine, and trying again does not help."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Driver(Protocol):
    """An engine. One thread at a time may use it."""

    @property
    def name(self) -> str:
        """Kind of engine: openvino, sim."""
        ...

    @property
    def limits(self) -> Limits:
        """Constant after loading."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do or report anything."""
        ...

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence; from now on it ends with exactly one `FinishedEvent`.

        Raises:
            RefusedError: It is not valid for this engine; it was not taken.
        """
        ...

    def cancel(self, key: int) -> None:
        """End a sequence at the next step; nothing happens when there is none of that key."""
        ...

    def step(self) -> StepEvents:
        """Compute one step for all running sequences; blocks while it computes."""
        ...

    def load(self) -> EngineLoad:
        """Return the state after the last step; cheap."""
        ...

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks: the sum of all `StepEvents.kv` so far."""
        ...
