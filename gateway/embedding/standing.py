"""Which replica of an embedding pool gets the next text, by how its last ones went; pure.

A replica that cannot be reached is ejected at once, one that fails after failures in a row: the one
that fails fastest would otherwise look the least busy. After a back-off that doubles, a single text
is its trial; an answer to it forgives everything.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 10.0
FAILURES_MAX = 3  # in a row
_DOUBLINGS_MAX = 16  # by then the back-off is the longest

_NEVER = float("-inf")


class Outcome(Enum):
    """How a text went, as far as it says something about the replica."""

    ANSWERED = auto()  # a refusal, too
    FAILED = auto()  # it computes, but not this
    UNREACHABLE = auto()
    UNKNOWN = auto()  # nobody waited for the end


@dataclass(slots=True)
class Standing:
    """What is known of one replica.

    Attributes:
        replica_id: Its name.
        in_flight: Texts that it has and that are waited for.
        failures: In a row.
        strikes: Ejections that are not forgiven.
        ejected_at_s: The last of them.
        again_at_s: When it gets a trial.
        is_on_trial: It has a text that decides.
        begun_at_s: When it was last given a text.
    """

    replica_id: str
    in_flight: int = 0
    failures: int = 0
    strikes: int = 0
    ejected_at_s: float = _NEVER
    again_at_s: float = _NEVER
    is_on_trial: bool = False
    begun_at_s: float = _NEVER

    def may_take(self, now_s: float) -> bool:
        """Return whether it gets work."""
        return not self.strikes or (now_s >= self.again_at_s and not self.is_on_trial)

    def begin(self, now_s: float) -> None:
        """Note that it is given a text."""
        self.in_flight += 1
        self.begun_at_s = now_s
        self.is_on_trial = self.strikes > 0

    def end(self, outcome: Outcome, begun_at_s: float, now_s: float) -> None:
        """Note how a text went; of one that was begun before an ejection it says nothing."""
        self.in_flight -= 1
        if begun_at_s <= self.ejected_at_s:
            return
        self.is_on_trial = False
        if outcome is Outcome.ANSWERED:
            self.forgive()
        elif outcome is Outcome.UNREACHABLE:
            self.eject(now_s)
        elif outcome is Outcome.FAILED:
            self.failures += 1
            if self.strikes or self.failures >= FAILURES_MAX:
                self.eject(now_s)

    def forgive(self) -> None:
        """Trust it as if nothing had been."""
        self.failures = self.strikes = 0
        self.is_on_trial = False

    def eject(self, now_s: float) -> None:
        """Give it nothing for a while."""
        self.strikes += 1
        self.failures = 0
        self.is_on_trial = False
        self.ejected_at_s = now_s
        doublings = min(self.strikes - 1, _DOUBLINGS_MAX)
        self.again_at_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0**doublings)


def choose(
    standings: Iterable[Standing], now_s: float, tried: Container[str] = ()
) -> Standing | None:
    """Return the least busy replica that may take a text, except `tried`; None without any.

    Of equals, the one that has waited longest for work.
    """
    fit = [s for s in standings if s.replica_id not in tried and s.may_take(now_s)]
    return min(fit, key=lambda s: (s.in_flight, s.begun_at_s), default=None)


def back_in_s(standings: Iterable[Standing], now_s: float) -> float:
    """Return after how long one of the ejected replicas may take work again, at the earliest."""
    waits = [s.again_at_s - now_s for s in standings]
    return max(BACKOFF_FIRST_S, min(waits, default=0.0))
