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
        is_asleep: Whether the engine sleeps now.
        problem: Reason why the engine did not do as asked; empty: it did.
        is_refused: Whether the engine will never sleep.
    """

    run: int
    is_asleep: bool
    problem: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class RestState:
    """The sleep of an engine, as it is wished and as it is.

    Attributes:
        sleeps: Whether the engine shall sleep.
        since_s: Since when that is wished.
        is_asleep: Whether the engine sleeps.
        is_asked: Whether the engine has been asked and has not answered.
        retry_at_s: Time at which the engine may be asked again.
        problem: Reason why the engine is not in the wanted state.
        is_refused: Whether the engine will never sleep.
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
            settle_s: Seconds after a change of the wanted state in which routers may still send
                requests.
        """
        if self.sleeps == self.is_asleep or self.is_asked or now_s < self.retry_at_s:
            return False
        if not self.sleeps:
            return True
        return not self.is_refused and not active and now_s >= self.since_s + settle_s


AWAKE = RestState()
