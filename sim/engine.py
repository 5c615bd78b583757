"""A model of an engine with continuous batching and chunked prefill, timed by a cost model.

The engine emits real step frames. A token is a function of the sequence's first prompt token and
the token's position. So a checker can compute every token that must arrive, also after a resume
with prompt + emitted ids.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.core.types.plan import EngineLimits
from sluice.wire.engine.v1 import engine_pb2 as engine


def token_at(first_prompt_token: int, position: int) -> int:
    """Return the token that every simulated engine emits at a position from the prompt's start."""
    return (first_prompt_token * 7919 + position * 104_729) % 50_000


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step, which is constant seconds plus seconds per prefill and decode token."""

    base_s: float = 0.008
    prefill_token_s: float = 5e-5
    decode_token_s: float = 1e-4


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence. A canary's tokens are passed to `answer` instead of being sent in frames."""

    sequence: int
    first: int
    prompt_tokens: int
    output_max: int
    answer: Callable[[list[int]], None] | None = None
    computed: int = 0
    output: list[int] = field(default_factory=list[int])
    is_admitted: bool = False

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= self.prompt_tokens


class SimEngine:
    """A simulated engine without a clock. `step` computes one step and returns its duration.

    Attributes:
        is_busy_fault: Whether every submit is refused with BUSY.
        is_lying: Whether the engine emits wrong tokens.
        slowness: Factor on the duration of the engine's steps.
    """

    def __init__(self, limits: EngineLimits, cost: StepCost) -> None:
        self.limits = limits
        self.cost = cost
        self.steps = 0
        self.is_busy_fault = False
        self.is_lying = False
        self.slowness = 1.0
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[_Sequence, None] = {}
        self._finished: list[engine.Finished] = []
        # Output of ended sequences, until the router confirms their end.
        self._outputs: dict[int, list[int]] = {}
        self._step_s = 0.0
        self._step_prompt_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether a step would compute no token and report no event."""
        return not (self._waiting or self._running or self._finished)

    @property
    def held(self) -> set[int]:
        """The ids of the routers' sequences that are waiting or running."""
        return {entry.sequence for entry in self._all() if entry.answer is None}

    def outputs(self) -> dict[int, list[int]]:
        """Return the output of sequences that are unfinished, or whose end is unconfirmed."""
        living = {entry.sequence: entry.output for entry in self._all() if entry.answer is None}
        return self._outputs | living

    def confirm(self, sequences: Iterable[int]) -> None:
        """Drop the output of sequences whose end is confirmed."""
        for sequence in sequences:
            self._outputs.pop(sequence, None)

    def submit(self, sequences: Iterable[engine.Sequence]) -> None:
        """Queue sequences. A sequence that does not fit into the engine is refused with BUSY."""
        held = len(self._waiting) + len(self._running)
        for entry in sequences:
            if self.is_busy_fault or held >= self.limits.sequences_max:
                self._end(entry.id, engine.FINISH_REASON_BUSY, code="busy")
                continue
            held += 1
            self._waiting.append(
                _Sequence(entry.id, entry.prompt[0], len(entry.prompt), entry.output_tokens_max)
            )

    def probe(self, prompt: list[int], tokens: int, answer: Callable[[list[int]], None]) -> None:
        """Run a canary inference before all waiting sequences, and call `answer` at its end."""
        self._waiting.appendleft(_Sequence(0, prompt[0], len(prompt), tokens, answer))

    def cancel(self, sequences: Iterable[int]) -> None:
        """Cancel sequences. Ids of sequences that have already ended are ignored."""
        gone = set(sequences)
        for entry in self._all():
            if entry.answer is None and entry.sequence in gone:
                self._drop(entry)
                self._finish(entry, engine.FINISH_REASON_CANCELLED)

    def fail_all(self) -> None:
        """Fail all sequences, like an engine whose computation has failed."""
        for entry in self._all():
            self._drop(entry)
            if entry.answer is None:
                self._finish(entry, engine.FINISH_REASON_FAILED, code="graph")

    def forget_finished(self) -> None:
        """Drop the ends that the next step would report."""
        self._finished.clear()

    def step(self) -> tuple[engine.StepFrame, float]:
        """Compute one step, and return its frame and its duration in seconds."""
        frame = engine.StepFrame()
        if self._waiting or self._running:
            self.steps += 1
            frame.steps = 1
            decodes = [entry for entry in self._running if entry.is_prefilled]
            budget = self.limits.step_tokens_max - len(decodes)
            prefilled = self._step_prompt_tokens = self._prefill(frame, budget, decodes)
            for entry in decodes:
                self._emit(entry, frame)
            cost = self.cost
            step_s = cost.base_s + prefilled * cost.prefill_token_s
            step_s += len(decodes) * cost.decode_token_s
            self._step_s = step_s * self.slowness
        frame.step = self.steps
        frame.finished.extend(self._finished)
        self._finished.clear()
        frame.state.CopyFrom(self.state())
        return frame, self._step_s if frame.steps else 0.0

    def state(self) -> engine.EngineState:
        """Return the engine's own counts."""
        used = sum(self._blocks(entry) for entry in self._running)
        owed = sum(entry.prompt_tokens - entry.computed for entry in self._all())
        return engine.EngineState(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=used,
            kv_blocks_total=self.limits.kv_blocks,
            prefill_tokens_owed=owed,
            step_us=int(self._step_s * 1e6),
            step_prompt_tokens=self._step_prompt_tokens,
            prefilling=sum(not entry.is_prefilled for entry in self._running),
        )

    def _all(self) -> list[_Sequence]:
        return [*self._waiting, *self._running]

    def _drop(self, entry: _Sequence) -> None:
        if entry in self._running:
            del self._running[entry]
        else:
            self._waiting.remove(entry)

    def _blocks(self, entry: _Sequence) -> int:
        return -(-(entry.prompt_tokens + entry.output_max) // self.limits.block_tokens)

    def _prefill(self, frame: engine.StepFrame, budget: int, decodes: list[_Sequence]) -> int:
        """Spend the token budget on prompts. Sequences with a whole prompt join `decodes`."""
        spent = 0
        used = sum(self._blocks(entry) for entry in self._running)
        while self._waiting:
            blocks = self._blocks(self._waiting[0])
            if used and used + blocks > self.limits.kv_blocks:
                break
            used += blocks
            self._running[self._waiting.popleft()] = None
        for entry in self._running:
            owed = min(entry.prompt_tokens - entry.computed, budget - spent)
            if owed <= 0:
                continue
            if not entry.is_admitted and entry.answer is None:
                entry.is_admitted = True
                frame.admitted.add(sequence=entry.sequence)
            entry.computed += owed
            spent += owed
            if entry.is_prefilled:
                decodes.append(entry)
        return spent

    def _emit(self, entry: _Sequence, frame: engine.StepFrame) -> None:
        token = token_at(entry.first, entry.prompt_tokens + len(entry.output)) + self.is_lying
        entry.output.append(token)
        if entry.answer is None:
            frame.sequence.append(entry.sequence)
            frame.count.append(1)
            frame.token.append(token)
        if len(entry.output) < entry.output_max:
            return
        del self._running[entry]
        if entry.answer is None:
            self._finish(entry, engine.FINISH_REASON_LENGTH)
        else:
            entry.answer(entry.output)

    def _finish(self, entry: _Sequence, reason: engine.FinishReason, *, code: str = "") -> None:
        self._outputs[entry.sequence] = entry.output
        self._end(entry.sequence, reason, len(entry.output), code=code)

    def _end(
        self, sequence: int, reason: engine.FinishReason, emitted: int = 0, *, code: str = ""
    ) -> None:
        self._finished.append(
            engine.Finished(sequence=sequence, reason=reason, code=code, output_tokens=emitted)
        )
