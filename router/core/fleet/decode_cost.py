"""Learns the cost of an output token on a replica at its full number of sequences.

A step without prompts takes `base + row * sequences`: a line fitted to recent steps. So even a
lightly loaded replica shows its capacity.
"""

_COLD_STEPS = 20  # the first steps of an engine teach nothing: it compiles, and its caches are cold
_SMOOTHING = 0.02
_STEPS_MIN = 50  # before the line is known
_SPREAD_MIN = 0.25  # variance of the sequences below which they tell no slope
_BEYOND_MAX = 4.0  # times the most sequences of late: longer steps are unknown
_FADE = 0.9995  # of that most, per step


class DecodeCost:
    """The line of one replica.

    Attributes:
        steps: Number of observed steps without prompts.
    """

    __slots__ = ("_costs", "_covariance", "_most", "_rows", "_variance", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self._most = self._rows = self._costs = self._variance = self._covariance = 0.0

    def observe(self, sequences: int, step_s: float) -> None:
        """Learn from a step without prompts."""
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
        """Whether enough steps were seen."""
        return self.steps >= _COLD_STEPS + _STEPS_MIN

    def full(self, sequences_max: float, tpot_s: float) -> tuple[int, float]:
        """Return the sequences of a full replica, and seconds per output token there.

        Args:
            sequences_max: Largest number of sequences with room.
            tpot_s: Longest step that the objective allows.
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
