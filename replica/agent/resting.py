"""When a ready engine is asked to sleep, and when to wake; pure, a part of a replica's state."""

from dataclasses import dataclass, replace
from math import inf

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class RestEngine:
    """Let the engine sleep, or wake it; answered by `Rested`."""

    run: int
    is_asleep: bool


@dataclass(frozen=True, slots=True)
class Rested:
    """An engine was asked to sleep or to wake.

    Attributes:
        run: Number of the engine's run.
        is_asleep: Whether it sleeps now.
        problem: Why it did not do as it was asked; empty: it did.
        is_refused: Whether it will never sleep.
    """

    run: int
    is_asleep: bool
    problem: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class RestState:
    """The sleep of an engine, as it is wished and as it is.

    Attributes:
        sleeps: Whether it shall sleep.
        since_s: Since when that is wished.
        is_asleep: Whether it sleeps.
        is_asked: Whether it has been asked and has not answered.
        retry_at_s: When it may be asked again.
        problem: Why it is not as it is wished.
        is_refused: Whether it will never sleep.
    """

    sleeps: bool = False
    since_s: float = -inf
    is_asleep: bool = False
    is_asked: bool = False
    retry_at_s: float = -inf
    problem: str = ""
    is_refused: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether routers may give it nothing new: it sleeps, or is about to."""
        return self.is_asleep or (self.sleeps and not self.is_refused)

    def wished(self, now_s: float, *, sleeps: bool) -> "RestState":
        """Return the state after a wish."""
        if sleeps == self.sleeps:
            return self
        return replace(self, sleeps=sleeps, since_s=now_s, retry_at_s=now_s, problem="")

    def heard(self, event: Rested, now_s: float) -> "RestState":
        """Return the state after an answer."""
        return replace(
            self,
            is_asked=False,
            is_asleep=event.is_asleep,
            problem=event.problem,
            is_refused=event.is_refused,
            retry_at_s=now_s + (_RETRY_S if event.problem else 0.0),
        )

    def ended(self) -> "RestState":
        """Return the state after the engine's end: another one begins awake."""
        return RestState(self.sleeps, self.since_s)

    def asks(self, active: int, now_s: float, settle_s: float) -> bool:
        """Return whether the engine is to be asked now.

        Args:
            active: Sequences that it held when it was probed last.
            now_s: Monotonic seconds.
            settle_s: For so long after a wish routers may still send something.
        """
        if self.sleeps == self.is_asleep or self.is_asked or now_s < self.retry_at_s:
            return False
        if not self.sleeps:
            return True
        return not self.is_refused and not active and now_s >= self.since_s + settle_s


AWAKE = RestState()
