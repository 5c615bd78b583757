"""Decides whether a request is split into prefill on one replica and decode on another.

The functions compare plain figures. Only cells with prefill replicas split requests, and they
decide for each request separately.
"""

from dataclasses import dataclass

# Cost of one second of prefill for each sequence that decodes on the same replica, expressed in
# seconds of TTFT. The prefill delays every decoding sequence a little.
_INTERFERENCE = 0.01
# Most waiting requests in the cost of an unsplit request. With eight requests the cost is large
# enough that no prefill replica stays idle while requests wait.
_WAITING_MAX = 8
# Priors for a cache of 320 KB per token (a 70-billion-parameter base) over 100-gigabit Ethernet.
_TOKEN_S = 32e-6
_SETUP_S = 0.01
_PRIOR_TOKENS = 2000.0  # the priors weigh as much as one transfer of this many tokens
_SMOOTHING = 0.2
_BACKOFF_FIRST_S = 1.0
_BACKOFF_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Whole:
    """The costs of a request that is served by a single replica.

    Attributes:
        backlog_s: Seconds of prefill work already queued on the replica.
        prefill_s: Seconds of the request's own prefill on the replica.
        decodes: Number of decoding sequences that the prefill slows down.
        waiting: Number of queued requests that the prefill delays, or 0 while a replica is free.
    """

    backlog_s: float
    prefill_s: float
    decodes: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """The costs of a request that is split between a prefill replica and a decode replica.

    Attributes:
        backlog_s: Seconds of prefill work already queued on the prefill replica.
        prefill_s: Seconds of the request's own prefill on the prefill replica.
        transfer_s: Seconds between the first and the second output token.
        output_tokens: Expected output tokens.
        decode_step_s: Seconds between later output tokens.
    """

    backlog_s: float
    prefill_s: float
    transfer_s: float
    output_tokens: int
    decode_step_s: float


def whole_cost_s(whole: Whole) -> float:
    """Return the predicted TTFT of an unsplit request, plus the delay of other requests."""
    others = _INTERFERENCE * whole.decodes + min(whole.waiting, _WAITING_MAX)
    return whole.backlog_s + whole.prefill_s * (1.0 + others)


def split_cost_s(split: PrefillSplit) -> float:
    """Return the predicted TTFT of a split request, plus the pause after the first token."""
    return split.backlog_s + split.prefill_s + split.transfer_s


def is_split_better(whole: Whole, split: PrefillSplit, tpot_s: float) -> bool:
    """Return whether a request is to be split.

    Args:
        whole: Costs on the best decoding replica alone.
        split: Costs on the best prefill replica, and then on the replica of `whole`.
        tpot_s: Objective of the mean seconds per output token, the pause included.
    """
    if split.output_tokens < 2:
        return False
    mean_s = split.decode_step_s + split.transfer_s / (split.output_tokens - 1)
    if split.transfer_s and mean_s > tpot_s:
        return False
    return split_cost_s(split) < whole_cost_s(whole)


class TransferTimes:
    """The learned duration of KV transfers, and the pause of transfers after a failure."""

    __slots__ = ("_backoff_s", "_seconds", "_tokens", "_until")

    def __init__(self) -> None:
        self._tokens = _PRIOR_TOKENS
        self._seconds = _PRIOR_TOKENS * _TOKEN_S
        self._backoff_s = 0.0
        self._until = float("-inf")

    def predict_s(self, tokens: int) -> float:
        """Return the predicted seconds to transfer the KV blocks of `tokens` tokens."""
        return _SETUP_S + tokens * self._seconds / self._tokens if tokens else 0.0

    def is_usable(self, now: float) -> bool:
        """Return whether transfers are permitted, that is, not paused after a failure."""
        return now >= self._until

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the learned duration with a complete transfer."""
        self._backoff_s = 0.0
        self._tokens += _SMOOTHING * (tokens - self._tokens)
        self._seconds += _SMOOTHING * (max(0.0, seconds - _SETUP_S) - self._seconds)

    def failed(self, now: float) -> None:
        """Pause transfers after a failure, twice as long after each further failure, up to 60 s."""
        if not self.is_usable(now):
            return  # this transfer was in progress when an earlier failure began the pause
        self._backoff_s = min(max(_BACKOFF_FIRST_S, 2 * self._backoff_s), _BACKOFF_MAX_S)
        self._until = now + self._backoff_s
