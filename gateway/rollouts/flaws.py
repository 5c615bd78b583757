"""Detects flaws of answers, such as an empty answer or a repetitive one. Pure.

A rollout compares the rates of two releases. Legitimate repetitions occur in both releases, so they
do not change the comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.rollouts.refusals import is_refusal

_RUN = 3  # Tokens per run. Natural text rarely repeats a run of this length within an answer.
_TOKENS_MIN = 8  # shorter answers are never judged repetitive
TOKENS_MAX = 1024  # Maximum number of examined tokens, which need less than 1 ms.


@dataclass(frozen=True, slots=True)
class Flaws:
    """Flaws of a complete answer.

    Attributes:
        is_refusal: Whether the model declined to answer.
        is_empty: Whether there is neither content nor reasoning nor a tool call.
        is_repetitive: Whether at least half of the runs of three tokens repeat earlier runs.
    """

    is_refusal: bool = False
    is_empty: bool = False
    is_repetitive: bool = False


def flaws_of(opening: str, tokens: Sequence[int], *, has_more: bool) -> Flaws:
    """Return the flaws of an answer.

    Args:
        opening: First characters of the content.
        tokens: All token ids of the answer.
        has_more: Whether the answer also has reasoning or tool calls.
    """
    return Flaws(
        is_refusal=is_refusal(opening),
        is_empty=not has_more and not opening.strip(),
        is_repetitive=is_repetitive(tokens),
    )


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Return whether at least half of an answer's runs of three tokens repeat earlier runs."""
    seen = tokens[:TOKENS_MAX]
    if len(seen) < _TOKENS_MIN:
        return False
    runs = len(seen) - _RUN + 1
    distinct = {tuple(seen[place : place + _RUN]) for place in range(runs)}
    return 2 * len(distinct) <= runs
