"""Decides when a ready engine should sleep or wake, for `replica.agent.replica_state`. Pure."""

from dataclasses import dataclass, replace
from math import inf

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class RestEngine:
    """Action: put the engine to sleep or wake it, and report `Rested`."""

    run: int
    is_asleep: bool


@dataclass(frozen=True, slots=True)
class Rested:
    """Event: a `RestEngine` action has ended.

    Attributes:
        run: Number of the engine's run.
        is_asleep: Whether the engine sleeps after the action.
        problem: Reason why the action failed, or empty if it succeeded.
        is_refused: Whether the engine refused because it does not support sleep.
    """

    run: int
    is_asleep: bool
    problem: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class RestState:
    """The desired and the actual sleep of an engine.

    Attributes:
        sleeps: Whether the control plane wants the engine to sleep.
        since_s: Time when `sleeps` last changed.
        is_asleep: Whether the engine sleeps now.
        is_asked: Whether a `RestEngine` action is in progress.
        retry_at_s: Time of the next attempt after a failure.
        problem: Reason why the engine is not in the desired state, or empty if it is.
        is_refused: Whether the engine has refused because it does not support sleep.
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
        """Whether routers send no new request, because the engine sleeps or is about to."""
        return self.is_asleep or (self.sleeps and not self.is_refused)

    def wished(self, now_s: float, *, sleeps: bool) -> "RestState":
        """Return the state after a change of the desired sleep."""
        if sleeps == self.sleeps:
            return self
        return replace(self, sleeps=sleeps, since_s=now_s, retry_at_s=now_s, problem="")

    def after(self, event: Rested, now_s: float) -> "RestState":
        """Return the state after the result of a `RestEngine` action."""
        return replace(
            self,
            is_asked=False,
            is_asleep=event.is_asleep,
            problem=event.problem,
            is_refused=event.is_refused,
            retry_at_s=now_s + (_RETRY_S if event.problem else 0.0),
        )

    def ended(self) -> "RestState":
        """Return the state after the engine's end. The next engine starts awake."""
        return RestState(self.sleeps, self.since_s)

    def is_due(self, active: int, now_s: float, settle_s: float) -> bool:
        """Return whether a `RestEngine` action is due.

        Args:
            active: Number of sequences in the engine at the last probe.
            now_s: Monotonic seconds.
            settle_s: Seconds after a change of `sleeps`. Meanwhile, routers that are not informed
                yet may still send requests.
        """
        if self.sleeps == self.is_asleep or self.is_asked or now_s < self.retry_at_s:
            return False
        if not self.sleeps:
            return True
        return not self.is_refused and not active and now_s >= self.since_s + settle_s


AWAKE = RestState()
