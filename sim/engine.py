"""A model of an engine: continuous batching with chunked prefill, timed by a cost model.

It speaks the real step frames. Its tokens are a function of the sequence's first prompt token and
the position, so that a checker knows every token that must arrive, also after a resume with
prompt + emitted ids.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from router.core.model import EngineLimits
from sluice.wire.engine.v1 import engine_pb2 as engine


def token_at(first_prompt_token: int, position: int) -> int:
    """Return the token that every simulated engine puts at a position (0 is the prompt's first)."""
    return (first_prompt_token * 7919 + position * 104_729) % 50_000


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step: a constant, and per token of prefill and of decode."""

    base_s: float = 0.008
    prefill_token_s: float = 5e-5
    decode_token_s: float = 1e-4


@dataclass(slots=True)
class _Sequence:
    sequence: int
    first: int
    prompt_tokens: int
    output_max: int
    computed: int = 0
    emitted: int = 0
    is_admitted: bool = False


class SimEngine:
    """One engine. The caller moves time: `step` does one step's work and says how long it took."""

    def __init__(self, limits: EngineLimits, cost: StepCost) -> None:
        self.limits = limits
        self.cost = cost
        self.steps = 0
        self.is_busy_fault = False  # answers every submit with BUSY
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._finished: list[engine.Finished] = []
        self._step_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do and nothing to say."""
        return not (self._waiting or self._running or self._finished)

    @property
    def held(self) -> set[int]:
        """The sequences that are waiting or running."""
        return {entry.sequence for entry in self._waiting} | set(self._running)

    def submit(self, sequences: Iterable[engine.Sequence]) -> None:
        """Take sequences, or refuse them with BUSY where there is no room."""
        for entry in sequences:
            if self.is_busy_fault or len(self.held) >= self.limits.sequences_max:
                self._finish(entry.id, engine.FINISH_REASON_BUSY, 0, code="busy")
                continue
            self._waiting.append(
                _Sequence(entry.id, entry.prompt[0], len(entry.prompt), entry.output_tokens_max)
            )

    def cancel(self, sequences: Iterable[int]) -> None:
        """End sequences; unknown ones have ended already."""
        gone = set(sequences)
        for entry in [*self._waiting, *self._running.values()]:
            if entry.sequence in gone:
                self._finish(entry.sequence, engine.FINISH_REASON_CANCELLED, entry.emitted)
        self._waiting = deque(entry for entry in self._waiting if entry.sequence not in gone)
        self._running = {key: entry for key, entry in self._running.items() if key not in gone}

    def fail_all(self) -> None:
        """End everything as a failed graph call does."""
        for entry in [*self._waiting, *self._running.values()]:
            self._finish(entry.sequence, engine.FINISH_REASON_FAILED, entry.emitted, code="graph")
        self._waiting.clear()
        self._running.clear()

    def step(self) -> tuple[engine.StepFrame, float]:
        """Do one step; return its frame and its duration in seconds."""
        self.steps += 1
        frame = engine.StepFrame(step=self.steps, steps=1)
        decodes = [entry for entry in self._running.values() if entry.computed]
        decodes = [entry for entry in decodes if entry.computed >= entry.prompt_tokens]
        prefilled = self._prefill(frame, self.limits.step_tokens_max - len(decodes), decodes)
        for entry in decodes:
            self._emit(entry, frame)
        cost = self.cost
        prefill_s = prefilled * cost.prefill_token_s
        self._step_s = cost.base_s + prefill_s + len(decodes) * cost.decode_token_s
        frame.finished.extend(self._finished)
        self._finished.clear()
        frame.state.CopyFrom(self.state())
        return frame, self._step_s

    def state(self) -> engine.EngineState:
        """Return the engine's own counts."""
        sequences = [*self._waiting, *self._running.values()]
        used = sum(self._blocks(entry) for entry in self._running.values())
        return engine.EngineState(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=used,
            kv_blocks_total=self.limits.kv_blocks,
            prefill_tokens_owed=sum(entry.prompt_tokens - entry.computed for entry in sequences),
            step_us=int(self._step_s * 1e6),
        )

    def _blocks(self, entry: _Sequence) -> int:
        return -(-(entry.prompt_tokens + entry.output_max) // self.limits.block_tokens)

    def _prefill(self, frame: engine.StepFrame, budget: int, decodes: list[_Sequence]) -> int:
        """Spend the budget on prompts; those that are complete join `decodes`."""
        spent = 0
        used = sum(self._blocks(entry) for entry in self._running.values())
        while self._waiting:
            blocks = self._blocks(self._waiting[0])
            if used and used + blocks > self.limits.kv_blocks:
                break
            used += blocks
            entry = self._waiting.popleft()
            self._running[entry.sequence] = entry
        for entry in self._running.values():
            owed = min(entry.prompt_tokens - entry.computed, budget - spent)
            if owed <= 0:
                continue
            if not entry.is_admitted:
                entry.is_admitted = True
                frame.admitted.add(sequence=entry.sequence)
            entry.computed += owed
            spent += owed
            if entry.computed == entry.prompt_tokens:
                decodes.append(entry)
        return spent

    def _emit(self, entry: _Sequence, frame: engine.StepFrame) -> None:
        frame.sequence.append(entry.sequence)
        frame.count.append(1)
        frame.token.append(token_at(entry.first, entry.prompt_tokens + entry.emitted))
        entry.emitted += 1
        if entry.emitted >= entry.output_max:
            del self._running[entry.sequence]
            self._finish(entry.sequence, engine.FINISH_REASON_LENGTH, entry.emitted)

    def _finish(
        self, sequence: int, reason: engine.FinishReason, emitted: int, *, code: str = ""
    ) -> None:
        self._finished.append(
            engine.Finished(sequence=sequence, reason=reason, code=code, output_tokens=emitted)
        )
