"""Finds replicas whose steps take longer than their peers' steps of similar size.

Every replica has a mean time for each size of step it has done; the median of these over the
replicas is the usual time. A step counts as its ratio to the usual time of its size, so that a
replica whose steps are fuller than the others' is not taken for a slow one.
"""

from collections import deque
from statistics import median

SLOW_FACTOR = 3.0
JUDGE_S = 0.1  # judge at most this often
WINDOW_STEPS = 256
STEPS_MIN = 100  # to have a 99th percentile
PEERS_MIN = 3  # replicas, to know what is usual
_P99_RANK = -(-WINDOW_STEPS // 100)  # the third slowest of 256
_STEPS_SHORT = 8
_USUAL_S = 1.0  # interval of computing the usual times
_SAMPLES_MIN = 4  # steps of a size before its mean counts
_SMOOTHING = 0.1
_SHORT_STEP_S = 0.002  # differences below this are noise


class Steps:
    """The steps of one replica."""

    __slots__ = ("is_suspect", "means", "p99", "ratios")

    def __init__(self) -> None:
        self.means: dict[int, list[float]] = {}  # by size: seconds, samples
        self.ratios: deque[float] = deque(maxlen=WINDOW_STEPS)  # to the usual time
        self.p99 = 0.0
        self.is_suspect = False  # had a slow step since the last judgement

    def clear(self) -> None:
        """Forget the recent steps; the means stay, as a vote on what is usual."""
        self.ratios.clear()
        self.is_suspect = False

    def is_slow_in_short(self) -> bool:
        """Return whether most of the few steps of a trial were slow."""
        return len(self.ratios) >= _STEPS_SHORT and median(self.ratios) > SLOW_FACTOR


class StepTimes:
    """The steps of all attached replicas of a cell.

    Attributes:
        has_suspects: Whether `slow` has a replica to judge.
        judged_at: Time of the last judgement.
    """

    def __init__(self) -> None:
        self.has_suspects = False
        self.judged_at = float("-inf")
        self._replicas: list[Steps] = []
        self._usual: dict[int, float] = {}  # seconds by size; 0.0: unknown
        self._usual_at = float("-inf")

    def join(self, steps: Steps) -> None:
        """Add a replica."""
        self._replicas.append(steps)

    def leave(self, steps: Steps) -> None:
        """Take a replica out; one that is not there is ignored."""
        self._replicas = [entry for entry in self._replicas if entry is not steps]

    def add(self, steps: Steps, size: int, step_s: float, now: float) -> bool:
        """Note a step; return whether it was slow.

        Args:
            steps: Step times of its replica.
            size: Powers of two in bytes: prompt tokens, decodes, and context.
            step_s: Duration of the step in seconds.
            now: Monotonic seconds.
        """
        step_s = max(step_s, _SHORT_STEP_S)
        seen = steps.means.get(size)
        if seen is None:
            steps.means[size] = [step_s, 1.0]
        else:
            seen[0] += _SMOOTHING * (step_s - seen[0])
            seen[1] += 1.0
        if now - self._usual_at >= _USUAL_S:
            self._find_usual(now)
        usual_s = self._usual.get(size)
        if usual_s is None:
            usual_s = self._usual[size] = self._usual_of_fuller(size)
        if not usual_s:
            return False
        ratio = step_s / usual_s
        steps.ratios.append(ratio)
        if ratio <= SLOW_FACTOR:
            return False
        steps.is_suspect = self.has_suspects = True
        return True

    def slow(self, now: float) -> list[Steps]:
        """Return the replicas whose 99th percentile is far above the median of all."""
        self.judged_at = now
        self.has_suspects = False
        known = [entry for entry in self._replicas if len(entry.ratios) >= STEPS_MIN]
        for entry in known:
            entry.p99 = sorted(entry.ratios)[-_P99_RANK]
        suspects = [entry for entry in known if entry.is_suspect]
        for entry in self._replicas:
            entry.is_suspect = False
        if len(known) < PEERS_MIN:
            return []
        limit = SLOW_FACTOR * max(1.0, median(entry.p99 for entry in known))
        return [entry for entry in suspects if entry.p99 > limit]

    def _find_usual(self, now: float) -> None:
        """Find the median, over the replicas, of their mean time for each size of step."""
        self._usual_at = now
        means: dict[int, list[float]] = {}
        for entry in self._replicas:
            for size, (mean_s, samples) in entry.means.items():
                if samples >= _SAMPLES_MIN:
                    means.setdefault(size, []).append(mean_s)
        self._usual = {
            size: median(times) for size, times in means.items() if len(times) >= PEERS_MIN
        }

    def _usual_of_fuller(self, size: int) -> float:
        """Return the usual time of the next fuller step size; 0.0: unknown.

        A step that takes much longer than fuller steps of its peers is certainly slow.
        """
        best_s, best = 0.0, 1 << 16
        prompt, decodes, context = size >> 16, size >> 8 & 255, size & 255
        for other, usual_s in self._usual.items():
            more = (other >> 16) - prompt, (other >> 8 & 255) - decodes, (other & 255) - context
            if usual_s and min(more) >= 0 and sum(more) < best:
                best_s, best = usual_s, sum(more)
        return best_s
