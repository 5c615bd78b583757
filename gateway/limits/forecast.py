"""Forecasts the tokens of an answer from the tenant's earlier answers. Pure.

A reservation of the whole `max_tokens` would leave most of a tenant's limit unused, because callers
set `max_tokens` far above the usual length. The mean length would be too small for half of the
answers. The mean plus the mean deviation is too small for few answers, and the settlement corrects
the difference.
"""

COLD_TOKENS = 512  # Reserved tokens before the first answer, if the caller set no bound.
# Weight of a new answer in the means, by the number of earlier answers. In the long run, about 30
# answers count.
_WEIGHTS = tuple(1 / (1 + seen) for seen in range(16))
_SEEN_MAX = len(_WEIGHTS) - 1


class AnswerForecast:
    """Forecast from the lengths of the answers of one model to one tenant.

    A request may have several answers.
    """

    __slots__ = ("_deviation", "_expected", "_mean", "_seen")

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0
        self._seen = 0
        self._expected = 0

    def tokens(self, output_tokens_max: int, answers: int, *, is_bounded: bool) -> int:
        """Return the tokens to reserve for a request, at most `output_tokens_max`.

        Args:
            output_tokens_max: Bound of all answers together.
            answers: Number of wanted answers, at least 1.
            is_bounded: Whether the caller chose the bound, which is then reserved in full before
                the first answer.
        """
        if self._seen:
            expected = self._expected * answers
        else:
            expected = output_tokens_max if is_bounded else COLD_TOKENS * answers
        return min(expected, output_tokens_max)

    def learn(self, output_tokens: int, answers: int) -> None:
        """Add the lengths of a request's answers, as one answer of their mean length."""
        seen, length = self._seen, output_tokens / answers
        if not seen:
            self._mean, self._deviation, self._seen = length, length / 2, 1
        else:
            weight = _WEIGHTS[seen]
            if seen < _SEEN_MAX:
                self._seen = seen + 1
            error = length - self._mean
            self._mean += weight * error
            self._deviation += weight * (abs(error) - self._deviation)
        self._expected = int(self._mean + self._deviation) + 1
