"""Decides whether a request met its latency objectives, and thus counts as goodput. Pure."""

from enum import StrEnum
from typing import NamedTuple

from gateway.settings import GatewaySettings

# Maximum number of prompt tokens for which `ttft_s` is the whole objective. For longer prompts, a
# multiple of the prefill time is added.
PROMPT_TOKENS_SHORT = 2048
_PREFILL_FACTOR = 2.0


class ObjectiveResult(StrEnum):
    """The result of a request against its objectives."""

    GOOD = "good"
    TTFT_MISSED = "ttft_missed"
    TPOT_MISSED = "tpot_missed"
    FAILED = "failed"  # the platform has failed by lack of capacity, loss or delay


class Objectives(NamedTuple):
    """The latency objectives of an installation.

    Attributes:
        ttft_s: Seconds from request to first token. For long prompts, twice their prefill time,
            as measured by the engine, is added.
        tpot_s: Mean seconds per output token, without the first token.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.05

    def result(
        self, ttft_s: float, prompt_tokens: int, prefill_s: float, tpot_s: float
    ) -> ObjectiveResult:
        """Return the result of a successful request. `tpot_s` is 0 for an answer of one token."""
        allowed_s = self.ttft_s
        if prompt_tokens > PROMPT_TOKENS_SHORT:
            allowed_s += _PREFILL_FACTOR * prefill_s
        if ttft_s > allowed_s:
            return ObjectiveResult.TTFT_MISSED
        return ObjectiveResult.TPOT_MISSED if tpot_s > self.tpot_s else ObjectiveResult.GOOD


OBJECTIVES = Objectives()


def mean_tpot_s(decode_s: float, output_tokens: int, answers: int) -> float:
    """Return the mean seconds per token after an answer's first, or 0 if there is no such token.

    Args:
        decode_s: Seconds from the first token of any answer to the end of the request.
        output_tokens: Tokens of all answers together.
        answers: Number of answers that were generated in parallel.
    """
    after_first = output_tokens / max(1, answers) - 1.0
    return decode_s / after_first if after_first > 0.0 else 0.0


def objectives_of(settings: GatewaySettings) -> Objectives:
    """Return the objectives that the operator has configured."""
    return Objectives(settings.objective_ttft_s, settings.objective_tpot_s)
