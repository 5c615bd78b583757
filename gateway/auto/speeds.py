"""Estimates the speeds of pools from recent answers. Pure.

A router predicts only the wait until a request's first step. The duration of a long prefill and of
the decode is estimated from recent requests.
"""

from dataclasses import dataclass

from gateway.dispatch.tally import Tally

# Weight of a new measurement, so that an estimate is the mean of about twenty requests.
_NEW = 0.05
# Minimum numbers of tokens for a measurement. With fewer tokens, a step's fixed time would distort
# the estimate.
_UNCACHED_LEAST = 32
_OUTPUT_LEAST = 8
_POOLS_MAX = 4096


@dataclass(slots=True)
class LearnedSpeed:
    """The estimated speed of a pool. A value without any measurement is 0.

    Attributes:
        prompt_token_s: Seconds of prefill per uncached prompt token.
        output_token_s: Seconds of decode per output token.
        output_tokens: Mean number of output tokens of an answer.
    """

    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    output_tokens: float = 0.0


_UNKNOWN = LearnedSpeed()


class LearnedSpeeds:
    """The estimated speeds of all pools to which this worker has sent requests."""

    def __init__(self) -> None:
        self._speeds: dict[str, LearnedSpeed] = {}

    def of(self, pool_id: str) -> LearnedSpeed:
        """Return the estimated speed of a pool, with zeros for an unknown pool."""
        return self._speeds.get(pool_id, _UNKNOWN)

    def note(self, pool_id: str, tally: Tally, answers: int, ended_at_s: float) -> None:
        """Update a pool's speed from a successful request that ended at `ended_at_s`."""
        if pool_id not in self._speeds and len(self._speeds) >= _POOLS_MAX:
            return
        speed = self._speeds.setdefault(pool_id, LearnedSpeed())
        uncached = tally.placed_prompt_tokens - tally.cached_tokens
        if tally.prefill_us and uncached >= _UNCACHED_LEAST:
            measured = tally.prefill_us / 1e6 / uncached
            speed.prompt_token_s = _smoothed(speed.prompt_token_s, measured)
        each = tally.output_tokens / max(1, answers)
        if not each:
            return
        speed.output_tokens = _smoothed(speed.output_tokens, each)
        if tally.first_at_s and each >= _OUTPUT_LEAST:
            measured = max(0.0, ended_at_s - tally.first_at_s) / each
            speed.output_token_s = _smoothed(speed.output_token_s, measured)


def _smoothed(known: float, new: float) -> float:
    return new if not known else known + _NEW * (new - known)
