"""Decides whether a request is split: prefill on one replica, decode on another.

Plain numbers in, a choice out. Only cells with prefill replicas split, and each request anew.
"""

from dataclasses import dataclass

# A second of prefill takes so much from each sequence that decodes there, in seconds of waiting
# for a first token: it delays them all, and each of them a little.
_INTERFERENCE = 0.01
# So many of those that wait count: enough to keep no prefill replica idle beside a queue.
_WAITING_MAX = 8
# Priors: 320 KB of cache per token (a 70-billion-parameter base) over 100-gigabit Ethernet.
_TOKEN_S = 32e-6
_SETUP_S = 0.01
_PRIOR_TOKENS = 2000.0  # weight of the prior, as so many tokens
_SMOOTHING = 0.2
_BACKOFF_FIRST_S = 1.0
_BACKOFF_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Whole:
    """The costs of a request that stays on one replica.

    Attributes:
        backlog_s: Seconds of prefill owed there.
        prefill_s: Seconds of the request's own prefill there.
        decodes: Sequences that its prefill slows down.
        waiting: Requests that would wait for its prefill; none while replicas are free.
    """

    backlog_s: float
    prefill_s: float
    decodes: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """The costs of the same request on two replicas.

    Attributes:
        backlog_s: Seconds of prefill owed where its prompt would be computed.
        prefill_s: Seconds of the request's own prefill there.
        transfer_s: Seconds between its first and its second token.
        output_tokens: Expected tokens of its answer.
        decode_step_s: Seconds between its other tokens.
    """

    backlog_s: float
    prefill_s: float
    transfer_s: float
    output_tokens: int
    decode_step_s: float


def whole_cost_s(whole: Whole) -> float:
    """Return the predicted TTFT, plus its costs for other requests."""
    others = _INTERFERENCE * whole.decodes + min(whole.waiting, _WAITING_MAX)
    return whole.backlog_s + whole.prefill_s * (1.0 + others)


def split_cost_s(split: PrefillSplit) -> float:
    """Return the predicted TTFT, plus the pause after the first token."""
    return split.backlog_s + split.prefill_s + split.transfer_s


def is_split_better(whole: Whole, split: PrefillSplit, tpot_s: float) -> bool:
    """Return whether a request is to be split.

    Args:
        whole: The request on the best replica that decodes.
        split: The request on the best prefill replica, then there.
        tpot_s: The objective of the mean time per output token: the pause is part of it.
    """
    if split.output_tokens < 2:
        return False
    mean_s = split.decode_step_s + split.transfer_s / (split.output_tokens - 1)
    if split.transfer_s and mean_s > tpot_s:
        return False
    return split_cost_s(split) < whole_cost_s(whole)


class TransferTimes:
    """The learned duration of transfers; after failures they pause."""

    __slots__ = ("_backoff_s", "_seconds", "_tokens", "_until")

    def __init__(self) -> None:
        self._tokens = _PRIOR_TOKENS
        self._seconds = _PRIOR_TOKENS * _TOKEN_S
        self._backoff_s = 0.0
        self._until = float("-inf")

    def predict_s(self, tokens: int) -> float:
        """Return the predicted time for the blocks of this many tokens."""
        return _SETUP_S + tokens * self._seconds / self._tokens if tokens else 0.0

    def is_usable(self, now: float) -> bool:
        """Return whether transfers are allowed: not for a while after a failure."""
        return now >= self._until

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a complete transfer."""
        self._backoff_s = 0.0
        self._tokens += _SMOOTHING * (tokens - self._tokens)
        self._seconds += _SMOOTHING * (max(0.0, seconds - _SETUP_S) - self._seconds)

    def failed(self, now: float) -> None:
        """Learn from a failed transfer: repeated failures make the pause longer."""
        if not self.is_usable(now):
            return  # it was under way when the first one failed
        self._backoff_s = min(max(_BACKOFF_FIRST_S, 2 * self._backoff_s), _BACKOFF_MAX_S)
        self._until = now + self._backoff_s
