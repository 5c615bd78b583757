"""Predicts the cost of an output token on a replica that runs its full number of sequences.

The duration of a step without prompts is modelled as `base + row * sequences`, fitted to recent
steps. So the capacity of a lightly loaded replica can be extrapolated.
"""

_COLD_STEPS = 20  # first steps of an engine, ignored because of compilation and cold caches
_SMOOTHING = 0.02
_STEPS_MIN = 50  # least steps for a usable fit
_SPREAD_MIN = 0.25  # least variance of the number of sequences for a usable slope
_BEYOND_MAX = 4.0  # extrapolation limit, as a multiple of the most sequences in recent steps
_FADE = 0.9995  # decay of the most sequences in recent steps, as a factor per step


class DecodeCost:
    """The fitted cost of decode steps on one replica.

    Attributes:
        steps: Number of observed steps without prompts.
    """

    __slots__ = ("_costs", "_covariance", "_most", "_rows", "_variance", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self._most = self._rows = self._costs = self._variance = self._covariance = 0.0

    def observe(self, sequences: int, step_s: float) -> None:
        """Update the fit with a step without prompts."""
        self.steps += 1
        if self.steps <= _COLD_STEPS:
            return
        weight = max(_SMOOTHING, 1 / (self.steps - _COLD_STEPS))
        off_rows, off_cost = sequences - self._rows, step_s - self._costs
        self._rows += weight * off_rows
        self._costs += weight * off_cost
        keep = 1 - weight
        self._variance = keep * (self._variance + weight * off_rows * off_rows)
        self._covariance = keep * (self._covariance + weight * off_rows * off_cost)
        self._most = max(sequences, self._most * _FADE)

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return self.steps >= _COLD_STEPS + _STEPS_MIN

    def full(self, sequences_max: float, tpot_s: float) -> tuple[int, float]:
        """Return the number of sequences and the seconds per output token at full load.

        Args:
            sequences_max: Most sequences that fit into the batch and the KV cache.
            tpot_s: Longest permitted step, which is the TPOT objective.
        """
        row_s = 0.0
        if self._variance > _SPREAD_MIN:
            row_s = max(0.0, self._covariance / self._variance)
        base_s = max(self._costs - row_s * self._rows, 0.1 * self._costs)
        most = min(sequences_max, _BEYOND_MAX * self._most)
        if row_s > 0.0:
            most = min(most, (tpot_s - base_s) / row_s)
        sequences = max(1, int(most))
        return sequences, base_s / sequences + row_s
