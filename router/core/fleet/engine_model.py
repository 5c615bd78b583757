"""A model of an engine's present work, predicted from the state in its last frame.

An engine computes prompts in the order of arrival, in steps of a bounded number of tokens, and
receives all its work from one router. So between two frames, the router can simulate the engine
step by step at its learned speed.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from router.core.fleet.speed import Speed

_STARVED_TOKENS = 64  # prompt tokens in a step whose token budget is already full of decodes
IDLE = float("-inf")  # value of `boundary_at` for an idle engine


# A prompt that an engine has not completed. The fields are the time when it was sent, its
# uncomputed tokens, and the seconds that these tokens add to steps. The type is a plain tuple,
# because every frame replaces the tuples of all waiting prompts. In a burst this is most of a
# frame's cost.
Prompt = tuple[float, float, float]


class EngineModel:
    """The model of one engine, whose attributes are valid after a call of `advance`.

    Attributes:
        boundary_at: Predicted end of the current step, or -inf if the engine is idle.
        tokens: Prompt tokens that are uncomputed after the current step.
        work_s: Seconds that these prompt tokens add to later steps.
        decoding: Number of decoding sequences at the end of the current step.
        slack_s: Sum over all steps of (TPOT objective - duration of the step). The growth of this
            sum since a sequence's first token is the time by which the sequence is ahead of its
            objective.
        pauses: Number of decode-only steps since the last step with prompt tokens.
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
        self._prompts: deque[Prompt] = deque()  # uncompleted prompts by arrival
        self._begun: list[float] = []  # `slack_s` at the first token of each sequence, sorted
        # Predicted first tokens that no frame has reported yet: (`slack_s`, number of sequences).
        self._guessed: list[tuple[float, int]] = []

    # --- reported facts ---------------------------------------------------------------------

    def began(self, slack_s: float) -> None:
        """Record the first token of a sequence, at which `EngineModel.slack_s` was `slack_s`."""
        insort(self._begun, slack_s)

    def ended(self, slack_s: float) -> None:
        """Record the end of a sequence, whose `slack_s` was passed to `began`."""
        del self._begun[bisect_right(self._begun, slack_s) - 1]

    def anchor(
        self, at: float, prompts: list[Prompt], decoding: int, slack_s: float, *, pauses: int
    ) -> None:
        """Replace the prediction by the reported state at the end of a step.

        Args:
            at: Time of the end of the step, not after now.
            prompts: Prompts that are not completed, in the order of arrival.
            decoding: Number of decoding sequences.
            slack_s: Value of `EngineModel.slack_s` at that time.
            pauses: Decode-only steps since the last step with prompt tokens.
        """
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
        """Record a dispatch, whose work begins with the next step, or now on an idle engine."""
        self.advance(now)
        self._prompts.append((now, tokens, work_s))
        self.tokens += tokens
        self.work_s += work_s
        if self.boundary_at < now:
            self.boundary_at = now
            self.advance(now)

    # --- prediction -------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Simulate all steps that begin up to now."""
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
            self.tokens = self.work_s = 0.0  # removes rounding errors

    def _decode_steps(self, until: float, now: float) -> None:
        step_s = self.speed.decode_step_s
        steps = max(1, int((min(until, now) - self.boundary_at) / step_s) + 1)
        self.boundary_at += steps * step_s
        self.slack_s += steps * (self.tpot_s - step_s)
        self.pauses += steps

    # --- queries ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no work."""
        return self.boundary_at == IDLE

    @property
    def owed_until(self) -> float:
        """Earliest time at which all owed work is computed, or `IDLE` without work.

        The result does not decrease as time passes, so `advance` need not be called before.
        """
        return self.boundary_at + self.work_s

    def next_is_full(self) -> bool:
        """Return whether the owed prompt tokens fill the next step."""
        return self.tokens >= 1 and self.tokens >= self.budget - self.decoding

    def at_risk(self, tokens: float, work_s: float) -> int:
        """Return how many decoding sequences would miss their objective because of a new prompt.

        On a slow engine, steps with prompt tokens take longer than the TPOT objective. A sequence
        is at risk if it is ahead of the objective by less than the total excess of these steps.
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
        """Assert that the recorded slacks equal the slacks of the decoding sequences."""
        assert self._begun == sorted(begun)
