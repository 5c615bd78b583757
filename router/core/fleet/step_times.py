"""Finds replicas whose steps are slower than their peers' steps of similar size.

Every replica has a mean duration for each size of step. The usual time of a size is the median of
the replicas' means. Each step is rated by the ratio of its duration to the usual time of its size.
So a replica with larger batches than its peers does not seem slow.
"""

from collections import deque
from statistics import median

SLOW_FACTOR = 3.0
JUDGE_S = 0.1  # least seconds between two judgements
WINDOW_STEPS = 256  # recent steps per replica that are judged
STEPS_MIN = 100  # least steps for a 99th percentile
PEERS_MIN = 3  # least replicas for a usual time
_P99_RANK = -(-WINDOW_STEPS // 100)  # rank of the 99th percentile, the third slowest of 256 steps
_STEPS_SHORT = 8  # least steps to judge a trial
_USUAL_S = 1.0  # seconds between two computations of the usual times
_SAMPLES_MIN = 4  # least steps of a size for a usable mean
_SMOOTHING = 0.1
_SHORT_STEP_S = 0.002  # shorter steps count as this long, because their differences are noise


class Steps:
    """The step times of one replica."""

    __slots__ = ("is_suspect", "means", "p99", "ratios")

    def __init__(self) -> None:
        self.means: dict[int, list[float]] = {}  # [mean seconds, samples] by size
        self.ratios: deque[float] = deque(maxlen=WINDOW_STEPS)  # duration / usual time, by step
        self.p99 = 0.0
        self.is_suspect = False  # whether there was a slow step since the last judgement

    def clear(self) -> None:
        """Delete the recent steps. The means remain, because the usual times depend on them."""
        self.ratios.clear()
        self.is_suspect = False

    def is_slow_in_short(self) -> bool:
        """Return whether most steps of a trial were slow."""
        return len(self.ratios) >= _STEPS_SHORT and median(self.ratios) > SLOW_FACTOR


class StepTimes:
    """The step times of all attached replicas of a cell.

    Attributes:
        has_suspects: Whether a replica had a slow step since the last judgement.
        judged_at: Time of the last judgement.
    """

    def __init__(self) -> None:
        self.has_suspects = False
        self.judged_at = float("-inf")
        self._replicas: list[Steps] = []
        self._usual: dict[int, float] = {}  # usual seconds by size, 0.0 if unknown
        self._usual_at = float("-inf")

    def join(self, steps: Steps) -> None:
        """Add the step times of a replica."""
        self._replicas.append(steps)

    def leave(self, steps: Steps) -> None:
        """Remove the step times of a replica, if present."""
        self._replicas = [entry for entry in self._replicas if entry is not steps]

    def add(self, steps: Steps, size: int, step_s: float, now: float) -> bool:
        """Record a step, and return whether the step was slow.

        Args:
            steps: Step times of the replica.
            size: Size of the step, with the bit lengths of its prompt tokens, decodes and context
                in one byte each.
            step_s: Duration of the step, in seconds.
            now: Time, in monotonic seconds.
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
        """Return the suspects whose 99th percentile is far above the median of all percentiles."""
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
        """Compute the usual time of each step size, which is the median of the replicas' means."""
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
        """Return the usual time of the next larger known step size, or 0.0 if there is none.

        A step that is much slower than the peers' larger steps is certainly slow.
        """
        best_s, best = 0.0, 1 << 16
        prompt, decodes, context = size >> 16, size >> 8 & 255, size & 255
        for other, usual_s in self._usual.items():
            more = (other >> 16) - prompt, (other >> 8 & 255) - decodes, (other & 255) - context
            if usual_s and min(more) >= 0 and sum(more) < best:
                best_s, best = usual_s, sum(more)
        return best_s
