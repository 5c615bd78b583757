"""Chooses the replica of an embedding pool for the next text, by recent outcomes. Pure.

An unreachable replica is ejected at once, and a failing replica after several consecutive failures.
Otherwise a replica that fails fast would appear the least busy. An ejected replica receives no
texts of clients. It is probed after a pause, which doubles with each failed probe. An answered
probe ends the ejection.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 2.0  # longest pause in seconds, short because a probe has only four tokens
FAILURES_MAX = 3  # consecutive failures that eject a replica
_DOUBLINGS_MAX = 8  # largest exponent in `_pause_s`, where the pause has reached its maximum

_NEVER = float("-inf")


class EmbedOutcome(Enum):
    """The outcome of a text or a probe, used to decide whether to trust the replica."""

    ANSWERED = auto()  # the answer is a vector or a refusal
    FAILED = auto()  # the replica is reachable, but could not compute the text
    UNREACHABLE = auto()
    UNKNOWN = auto()  # the text was cancelled, so the outcome proves nothing


@dataclass(slots=True)
class EmbedderStanding:
    """The recent outcomes of one replica.

    Attributes:
        replica_id: Id of the replica.
        in_flight: Number of texts at the replica whose callers still wait.
        failures: Number of consecutive failures.
        strikes: Number of ejections and failed probes since the last answered probe.
        ejected_at_s: Time of the last ejection or failed probe.
        is_probed: Whether a probe is in flight.
        begun_at_s: Time at which the last text was sent to the replica.
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
        """Whether the replica is not ejected, so that it receives texts."""
        return not self.strikes

    def begin(self, now_s: float) -> None:
        """Record a text that is sent to the replica."""
        self.in_flight += 1
        self.begun_at_s = now_s

    def end(self, outcome: EmbedOutcome, begun_at_s: float, now_s: float) -> None:
        """Record the outcome of a text, unless it was sent before the last ejection."""
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
        """Eject the replica, so that it receives no texts until a probe is answered."""
        self.strikes += 1
        self.ejected_at_s = now_s

    def forgive(self) -> None:
        """End the ejection, and clear the counts of failures."""
        self.failures = self.strikes = 0

    def starts_probe(self, now_s: float) -> bool:
        """Return whether a probe is due. If so, the probe counts as in flight."""
        if self.is_trusted or self.is_probed or now_s < self.ejected_at_s + self._pause_s:
            return False
        self.is_probed = True
        return True

    def end_probe(self, outcome: EmbedOutcome, now_s: float) -> None:
        """Record the outcome of a probe, which ends the ejection or renews it."""
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
    """Return the least busy trusted replica that is not in `tried`, or None if there is none.

    Of equally busy replicas, the one whose last text was sent first is returned.
    """
    fit = [s for s in standings if s.is_trusted and s.replica_id not in tried]
    return min(fit, key=lambda s: (s.in_flight, s.begun_at_s), default=None)
