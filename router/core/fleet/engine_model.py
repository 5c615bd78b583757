"""A model of an engine's present work, predicted from the state in its last frame.

Engines compute prompts in the order of arrival, in steps of a bounded number of tokens, and the
router sends them all their work. So between two frames the router follows each engine step by step
at its learned speed.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from router.core.fleet.speed import Speed

_STARVED_TOKENS = 64  # prompt tokens per step when decodes alone fill the budget
IDLE = float("-inf")  # `boundary_at` of an engine that does nothing


# A prompt that an engine has not begun or not completed: when it was sent, what is left of it in
# tokens, and what that adds to steps in seconds. Every frame makes anew those of all that wait, so
# they are tuples: in a burst they would else be most of a frame's cost.
Prompt = tuple[float, float, float]


class EngineModel:
    """The model of one engine; call `advance` before reading it.

    Attributes:
        boundary_at: End of the step in flight; -inf: the engine is idle.
        tokens: Prompt tokens owed beyond the step in flight.
        work_s: Seconds that these tokens add to their steps.
        decoding: Sequences that decode, at the end of the step in flight.
        slack_s: Running sum over all steps of the objective per output token minus the step's
            duration. A sequence is ahead of its objective by the sum's growth since its first
            token.
        pauses: Decode-only steps since the last one that computed a prompt.
    """

    __slots__ = (
        *("boundary_at", "budget", "slack_s", "decoding", "pauses", "speed", "tokens"),
        *("tpot_s", "work_s", "_begun", "_guessed", "_prompts"),
    )

    def __init__(self, speed: Speed, budget: int, tpot_s: float) -> None:
        self.speed = speed
        self.budget = budget
        self.tpot_s = tpot_s
        self.boundary_at = IDLE
        self.tokens = self.work_s = self.slack_s = 0.0
        self.decoding = self.pauses = 0
        self._prompts: deque[Prompt] = deque()  # in the order of arrival
        self._begun: list[float] = []  # credit at the first token of each that decodes, sorted
        # Sequences that the frames do not tell of yet: the credit, and how many began at it.
        self._guessed: list[tuple[float, int]] = []

    # --- what is known ----------------------------------------------------------------------

    def began(self, slack_s: float) -> None:
        """Note a first token, with the slack at that time."""
        insort(self._begun, slack_s)

    def ended(self, slack_s: float) -> None:
        """Note the end of a sequence that began at this slack."""
        del self._begun[bisect_right(self._begun, slack_s) - 1]

    def anchor(
        self, at: float, prompts: list[Prompt], decoding: int, slack_s: float, *, pauses: int
    ) -> None:
        """Restart from the true state at the end of a step, at a time not after now."""
        self._prompts = deque(prompts)
        self.tokens = self.work_s = 0.0
        for _, tokens, work_s in prompts:
            self.tokens += tokens
            self.work_s += work_s
        self.decoding = decoding
        self.slack_s = slack_s
        self.pauses = pauses
        self.boundary_at = at
        self._guessed.clear()

    def send(self, tokens: float, work_s: float, now: float) -> None:
        """Note a dispatch; its work begins with the next step, at once if the engine is idle."""
        self.advance(now)
        self._prompts.append((now, tokens, work_s))
        self.tokens += tokens
        self.work_s += work_s
        if self.boundary_at < now:
            self.boundary_at = now
            self.advance(now)

    # --- what follows -----------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Simulate the steps that begin until now."""
        while IDLE < self.boundary_at <= now:
            prompts = self._prompts
            if prompts and prompts[0][0] <= self.boundary_at:
                self._prefill_step()
            elif self.decoding:
                self._decode_steps(prompts[0][0] if prompts else now, now)
            elif prompts:
                self.boundary_at = prompts[0][0]
            else:
                self.boundary_at = IDLE

    def _prefill_step(self) -> None:
        room = float(max(self.budget - self.decoding, _STARVED_TOKENS))
        began_at, computed, completed = self.boundary_at, 0.0, 0
        step_s = self.speed.decode_step_s
        prompts = self._prompts
        while prompts and room > 0 and prompts[0][0] <= began_at:
            sent_at, tokens, work_s = prompts[0]
            chunk = min(room, tokens)
            share_s = work_s * chunk / tokens if tokens else work_s
            self.work_s -= share_s
            step_s += share_s
            room -= chunk
            computed += chunk
            if chunk < tokens:
                prompts[0] = (sent_at, tokens - chunk, work_s - share_s)
            else:
                prompts.popleft()
                completed += 1
        self.tokens -= computed
        self.boundary_at += step_s
        self.slack_s += self.tpot_s - step_s
        self.pauses = 0
        self.decoding += completed
        if completed:
            self._guessed.append((self.slack_s, completed))
        if not prompts:
            self.tokens = self.work_s = 0.0  # rounding errors

    def _decode_steps(self, until: float, now: float) -> None:
        step_s = self.speed.decode_step_s
        steps = max(1, int((min(until, now) - self.boundary_at) / step_s) + 1)
        self.boundary_at += steps * step_s
        self.slack_s += steps * (self.tpot_s - step_s)
        self.pauses += steps

    # --- queries ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the engine does nothing."""
        return self.boundary_at == IDLE

    @property
    def owed_until(self) -> float:
        """Earliest time when all owed work is done; `IDLE` where there is none.

        Time alone does not make it earlier, so unlike all else it may be read without `advance`.
        """
        return self.boundary_at + self.work_s

    def next_is_full(self) -> bool:
        """Return whether the present work fills the next step."""
        return self.tokens >= 1 and self.tokens >= self.budget - self.decoding

    def at_risk(self, tokens: float, work_s: float) -> int:
        """Return how many decoding sequences would miss their objective for one more prompt.

        On a slow engine, steps with prompts take longer than the objective allows; sequences whose
        slack is below that excess are at risk.
        """
        begun = self._begun
        if not begun and not self._guessed:
            return 0
        steps = (self.tokens + tokens) / self.budget
        spare_s = self.tpot_s - self.speed.decode_step_s
        loss_s = self.work_s + work_s - steps * spare_s
        if loss_s <= 0.0 or spare_s <= 0.0:
            return 0
        least_s = self.slack_s - loss_s
        at_risk = len(begun) - bisect_right(begun, least_s)
        return at_risk + sum(count for slack_s, count in self._guessed if slack_s > least_s)

    def check(self, begun: Iterable[float]) -> None:
        """Assert that the slacks are those of the decoding sequences."""
        assert self._begun == sorted(begun)
