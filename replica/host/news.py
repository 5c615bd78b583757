"""Queues a router's unsent events, merges those of several steps, and bounds their size.

The step loop adds the events of a step (`StepNews`) to an `Outbox`, from which the attachment's
sender thread sends them. A frame costs one credit of the router. Without credit, later news are
merged into the unsent news. The code runs for every token of an engine, so it appends a whole
column per step instead of single tokens.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

from replica.engine.types import EngineLoad, TokenLogprobs
from sluice.wire.engine.v1 import engine_pb2 as wire

_IDLE = EngineLoad()
# Largest number of unsent entries (tokens, logprobs, cache changes) for one router, after which it
# is detached. They are ten minutes of a fast engine, or about 100 MB.
PENDING_ENTRIES_MAX = 2_000_000
# Largest number of tokens in stored ends that a router has not confirmed. If the router resumes,
# these ends are sent again. For a router that never grants credit, only the newest are stored.
UNCONFIRMED_TOKENS_MAX = 1_000_000
_ENDED_WEIGHT = 64  # memory of an end's record without its tokens, as a number of tokens


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """The whole output of a sequence so far, stored in case its router resumes.

    Attributes:
        output: Emitted tokens.
        admitted: Admission message, or None before the admission.
        logprobs: Logprobs of each output token if the sequence requested them. An alternative has
            8 bytes.
        prompt_logprobs: Logprobs of the prompt's tokens, if the sequence requested them.
    """

    output: list[int] = field(default_factory=list[int])
    admitted: wire.Admitted | None = None
    logprobs: wire.Logprobs | None = None
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list[wire.PromptLogprobs])


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The end of a sequence. `told` is its output, or None if it was never accepted."""

    finished: wire.Finished
    told: SequenceRecord | None = None

    @property
    def weight(self) -> int:
        """Memory of the end, as a number of tokens."""
        told = self.told
        if told is None:
            return _ENDED_WEIGHT
        parts = [*told.prompt_logprobs, *(() if told.logprobs is None else (told.logprobs,))]
        entries = sum(len(part.logprob) + len(part.top_token) for part in parts)
        return _ENDED_WEIGHT + len(told.output) + entries


@dataclass(slots=True)
class StepNews:
    """The unsent events of one attachment, from one step or merged from several steps.

    Attributes:
        step: Number of the last step whose events are included.
        steps: Number of steps whose events are included.
        columns: Pairs (the router's sequence ids, the tokens of these sequences), one per step with
            tokens.
        has_runs: Whether a sequence may appear more than once in one column.
        entries: Memory of the columns and logprobs, as a number of tokens.
        logprobs: Pairs (sequence, logprobs of one token), in the order of the tokens.
        prompt_logprobs: Logprobs of parts of prompts.
        admitted: Admission messages, one per admitted sequence.
        ended: Ends, one per ended sequence.
        kv: Block hash -> whether the block is now in the cache.
        kv_reset: Whether `kv` is the complete state instead of a change.
        load: Load of the engine after the last step.
    """

    step: int = 0
    steps: int = 0
    columns: list[tuple[list[int], list[int]]] = field(
        default_factory=list[tuple[list[int], list[int]]]
    )
    has_runs: bool = False
    entries: int = 0
    logprobs: list[tuple[int, TokenLogprobs]] = field(
        default_factory=list[tuple[int, TokenLogprobs]]
    )
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list[wire.PromptLogprobs])
    admitted: list[wire.Admitted] = field(default_factory=list[wire.Admitted])
    ended: list[SequenceEnd] = field(default_factory=list[SequenceEnd])
    kv: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    kv_reset: bool = False
    load: EngineLoad = _IDLE

    @property
    def is_heartbeat(self) -> bool:
        """Whether the news contain only the engine's load."""
        return not (
            self.columns
            or self.admitted
            or self.ended
            or self.kv
            or self.kv_reset
            or self.prompt_logprobs
        )

    def add_tokens(self, ids: list[int], tokens: list[int]) -> None:
        """Add the columns of a step. The caller must not change the lists afterwards."""
        self.columns.append((ids, tokens))
        self.entries += len(ids)

    def add_logprobs(self, sequence: int, entry: TokenLogprobs) -> None:
        """Add the logprobs of one token."""
        self.logprobs.append((sequence, entry))
        self.entries += 1 + len(entry.top)

    def add_prompt_logprobs(self, part: wire.PromptLogprobs) -> None:
        """Add the logprobs of some prompt tokens."""
        self.prompt_logprobs.append(part)
        self.entries += len(part.logprob) + len(part.top_token)

    def merge(self, later: "StepNews") -> None:
        """Merge the news of a later step into these."""
        self.step = later.step
        self.steps += later.steps
        self.columns += later.columns
        self.has_runs |= later.has_runs
        self.entries += later.entries
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.admitted += later.admitted
        self.ended += later.ended
        if later.kv_reset:
            self.kv, self.kv_reset = later.kv, True
        else:
            self.kv.update(later.kv)
        self.load = later.load


class Outbox:
    """Unsent news and credit of one attachment, shared by the step loop and its sender thread."""

    def __init__(self, credit_frames: int) -> None:
        self._changed = threading.Condition()
        self._credit = credit_frames
        self._pending: StepNews | None = None
        self._is_closed = False
        self._taken_frames = self._confirmed_frames = 0
        self._last_step_frame = 0
        self._grants = 0
        # pairs (number of the frame that carries the end, end)
        self._unconfirmed: deque[tuple[int, SequenceEnd]] = deque()
        self._unconfirmed_tokens = 0

    def post(self, news: StepNews) -> bool:
        """Add the news of a step. The caller must not change them afterwards.

        Returns False if the router has left too many entries unread.
        """
        with self._changed:
            if self._pending is None:
                self._pending = news
            else:
                self._pending.merge(news)
            if self._credit:
                self._changed.notify()
            return self._pending.entries + len(self._pending.kv) <= PENDING_ENTRIES_MAX

    def add_credit(self, frames: int) -> None:
        """Permit this many more frames, and count the same number of sent frames as confirmed."""
        with self._changed:
            self._grants += 1
            self._credit += frames
            # A router may grant more credit than it used, so only sent frames are confirmed.
            self._confirmed_frames = min(self._taken_frames, self._confirmed_frames + frames)
            while self._unconfirmed and self._unconfirmed[0][0] <= self._confirmed_frames:
                self._forget()
            if self._pending is not None:
                self._changed.notify()

    def close(self) -> None:
        """Refuse further news. Unsent news are still sent if there is credit."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def abandon(self) -> list[SequenceEnd]:
        """Close without sending pending news, and return the ends that may not have arrived."""
        with self._changed:
            ended = [ended for _, ended in self._unconfirmed]
            if self._pending is not None:
                ended += self._pending.ended
            self._pending = None
            self._unconfirmed.clear()
            self._unconfirmed_tokens = 0
            self._is_closed = True
            self._changed.notify()
            return ended

    def take(self, timeout_s: float) -> tuple[StepNews | None, bool]:
        """Return the news to send now, or None, and whether the outbox is finished.

        Uses one credit for returned news. Waits up to `timeout_s` until there are news and credit,
        or until the outbox is closed.
        """
        with self._changed:
            if not (self._is_closed or self._sendable()):
                self._changed.wait(timeout_s)
            if not self._sendable():
                return None, self._is_closed
            news, self._pending = self._pending, None
            self._credit -= 1
            self._taken_frames += 1
            if news is not None:
                if news.steps:
                    self._last_step_frame = self._taken_frames
                for ended in news.ended:
                    self._unconfirmed.append((self._taken_frames, ended))
                    self._unconfirmed_tokens += ended.weight
                while self._unconfirmed_tokens > UNCONFIRMED_TOKENS_MAX:
                    self._forget()
            return news, self._is_closed

    @property
    def unconfirmed_since_grant(self) -> int | None:
        """The number of credit grants so far, or None if all news of steps are confirmed."""
        with self._changed:
            is_owed = self._last_step_frame > self._confirmed_frames
            return self._grants if is_owed else None

    def _sendable(self) -> bool:
        return self._pending is not None and self._credit > 0

    def _forget(self) -> None:
        _, ended = self._unconfirmed.popleft()
        self._unconfirmed_tokens -= ended.weight
