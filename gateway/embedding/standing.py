"""Which replica of an embedding pool gets the next text, by how its last ones went; pure.

A replica that cannot be reached is ejected at once, one that fails after failures in a row: the one
that fails fastest would otherwise look the least busy. An ejected one gets no client's text. After
a pause that doubles it is probed, and an answer forgives everything.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 2.0  # a probe costs as much as four tokens
FAILURES_MAX = 3  # in a row
_DOUBLINGS_MAX = 8  # by then the pause is the longest

_NEVER = float("-inf")


class EmbedOutcome(Enum):
    """How a text or a probe went, as far as it says something about the replica."""

    ANSWERED = auto()  # a refusal, too
    FAILED = auto()  # it computes, but not this
    UNREACHABLE = auto()
    UNKNOWN = auto()  # nobody waited for the end


@dataclass(slots=True)
class EmbedderStanding:
    """The standing of one replica.

    Attributes:
        replica_id: Its name.
        in_flight: Texts that it has and that callers wait for.
        failures: Failures in a row.
        strikes: Ejections that are not forgiven.
        ejected_at_s: Time of the last ejection.
        is_probed: Whether a probe is on its way.
        begun_at_s: Time of the last text that it was given.
    """

    replica_id: str
    in_flight: int = 0
    failures: int = 0
    strikes: int = 0
    ejected_at_s: float = _NEVER
    is_probed: bool = False
    begun_at_s: float = _NEVER

    @property
    def is_trusted(self) -> bool:
        """Whether it gets texts."""
        return not self.strikes

    def begin(self, now_s: float) -> None:
        """Note that it is given a text."""
        self.in_flight += 1
        self.begun_at_s = now_s

    def end(self, outcome: EmbedOutcome, begun_at_s: float, now_s: float) -> None:
        """Note how a text went; one that was begun before an ejection says nothing more."""
        self.in_flight -= 1
        if self.strikes or begun_at_s <= self.ejected_at_s:
            return
        if outcome is EmbedOutcome.ANSWERED:
            self.failures = 0
        elif outcome is EmbedOutcome.UNREACHABLE:
            self.eject(now_s)
        elif outcome is EmbedOutcome.FAILED:
            self.failures += 1
            if self.failures >= FAILURES_MAX:
                self.eject(now_s)

    def eject(self, now_s: float) -> None:
        """Give it no texts until a probe is answered."""
        self.strikes += 1
        self.ejected_at_s = now_s

    def forgive(self) -> None:
        """Trust it as if nothing had been."""
        self.failures = self.strikes = 0

    def starts_probe(self, now_s: float) -> bool:
        """Return whether a probe is due; then it begins now."""
        if self.is_trusted or self.is_probed or now_s < self.ejected_at_s + self._pause_s:
            return False
        self.is_probed = True
        return True

    def end_probe(self, outcome: EmbedOutcome, now_s: float) -> None:
        """Note how a probe went."""
        self.is_probed = False
        if outcome is EmbedOutcome.ANSWERED:
            self.forgive()
        elif outcome is not EmbedOutcome.UNKNOWN and self.strikes:
            self.eject(now_s)

    @property
    def _pause_s(self) -> float:
        return min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0 ** min(self.strikes - 1, _DOUBLINGS_MAX))


def choose(
    standings: Iterable[EmbedderStanding], tried: Container[str] = ()
) -> EmbedderStanding | None:
    """Return the least busy trusted replica, except `tried`; None without any.

    Of equals, the one that has waited longest for work.
    """
    fit = [s for s in standings if s.is_trusted and s.replica_id not in tried]
    return min(fit, key=lambda s: (s.in_flight, s.begun_at_s), default=None)
