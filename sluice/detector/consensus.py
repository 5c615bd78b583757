"""Decides which answer to a canary prompt is right, and whether another answer differs. Pure.

The right answer is the answer of more than half of at least three replicas. Canary prompts are
decoded greedily, so the answers of two healthy engines can diverge in one case only. Two tokens are
almost equally probable, and are rounded differently in different batches. This fork is recognized
by its logprobs and accepted, and only the tokens before the fork are compared. Without logprobs,
any different token is a difference.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nsmallest
from math import isfinite, log, nan
from statistics import median

CANDIDATES_MAX = 16  # most distinct answers that are compared with all other answers
_HALF = log(0.5)


class Difference(StrEnum):
    """The kind of difference between an answer and the right one."""

    TOKENS = "tokens"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class Rules:
    """The thresholds for comparisons of answers.

    Attributes:
        voters_min: Least number of replicas for a consensus.
        near_tie: Largest difference of two logprobs, in nats, whose order rounding may swap. The
            value suits 16-bit logits, which have steps of 0.125 above 16.
        drift: Largest mean difference of the logprobs of equal tokens, in nats, in a pool whose
            noise is unknown. Above this limit an answer is wrong.
        drift_min: Lower bound of the fitted drift, for replicas that agree to the last digit.
        drift_noises: Fitted drift, as a multiple of the replicas' median difference, at most
            `drift`.
        drift_tokens_min: Least number of tokens that the sum of differences is divided by, since a
            single token may differ by more.
    """

    voters_min: int = 3
    near_tie: float = 0.25
    drift: float = 0.5
    drift_min: float = 0.06
    drift_noises: float = 5.0
    drift_tokens_min: int = 4


RULES = Rules()


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids with their logprobs, which are empty if the engine reports none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


def difference(found: Text, truth: Text, rules: Rules = RULES) -> Difference | None:
    """Return the kind of difference from the right answer, or None if the answers agree."""
    fork = _fork(found, truth)
    if _drift(found, truth, fork, rules.drift_tokens_min) > rules.drift:
        return Difference.LOGPROBS
    if fork == len(found.token_ids) == len(truth.token_ids):
        return None
    return None if _is_near_tie(found, truth, fork, rules) else Difference.TOKENS


def _fork(found: Text, truth: Text) -> int:
    """Return the number of equal tokens before the first different token."""
    pairs = zip(found.token_ids, truth.token_ids, strict=False)
    shorter = min(len(found.token_ids), len(truth.token_ids))
    return next((i for i, (mine, right) in enumerate(pairs) if mine != right), shorter)


def _drift(found: Text, truth: Text, fork: int, tokens_min: int) -> float:
    """Return the mean difference of the logprobs of equal tokens, or 0 without logprobs."""
    compared = [
        abs(mine - right) if isfinite(mine) else float("inf")
        for mine, right in zip(found.logprobs[:fork], truth.logprobs[:fork], strict=False)
        if isfinite(right)
    ]
    return sum(compared) / max(len(compared), tokens_min)


def _is_near_tie(found: Text, truth: Text, fork: int, rules: Rules) -> bool:
    """Return whether both tokens at a fork are almost equally probable."""
    if fork >= min(len(found.logprobs), len(truth.logprobs)):
        return False
    mine, right = found.logprobs[fork], truth.logprobs[fork]
    return abs(mine - right) <= rules.near_tie and max(mine, right) <= _HALF + rules.near_tie


def fitted(common: Text, answers: Iterable[Sequence[Text]], rules: Rules = RULES) -> Rules:
    """Return the rules adjusted to the rounding differences among a pool's honest replicas.

    Args:
        common: Right answer.
        answers: Last answers of each replica. More than half of the replicas must be honest.
        rules: Rules for a pool whose noise is unknown.
    """
    drifts = [
        max((_drift(it, common, fork, rules.drift_tokens_min) for it, fork in forks), default=0.0)
        for texts in answers
        if (forks := [(it, fork) for it in texts if (fork := _fork(it, common))])
    ]
    noise = median(drifts) if drifts else 0.0
    return replace(rules, drift=min(max(rules.drift_min, rules.drift_noises * noise), rules.drift))


def consensus(voters: Sequence[Text], rules: Rules = RULES) -> Text | None:
    """Return the answer that more than half of at least `voters_min` answers agree with, or None.

    If several answers qualify, the answer with the most votes is returned. Its logprobs are medians
    over the equal answers. Only `CANDIDATES_MAX` distinct answers are compared with all others, so
    the cost grows linearly with the number of voters.
    """
    if len(voters) < rules.voters_min:
        return None
    kinds: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for text in voters:
        kinds.setdefault(text.token_ids, []).append(text.logprobs)
    best: Text | None = None
    best_votes = len(voters) // 2
    if not any(text.logprobs for text in voters):  # without logprobs only equal answers agree
        common = max(kinds, key=lambda kind: len(kinds[kind]))
        return Text(common) if len(kinds[common]) > best_votes else None
    for token_ids in _candidates({kind: len(alike) for kind, alike in kinds.items()}):
        candidate = Text(token_ids, _medians(kinds[token_ids]))
        votes = _votes(voters, candidate, best_votes, rules)
        if votes > best_votes:
            best, best_votes = candidate, votes
        if best_votes == len(voters):
            break
    return best


def _candidates(kinds: Mapping[tuple[int, ...], int]) -> list[tuple[int, ...]]:
    """Return the most frequent answers, and the answer of the majority, token by token.

    In some pools, near ties make every answer unique. The most frequent token at each position then
    leads to an answer that a majority agrees with. Wrong replicas may be fewer, but may agree
    better with each other.
    """
    frequent = nsmallest(CANDIDATES_MAX - 1, kinds, key=lambda kind: (-kinds[kind], kind))
    common, place = list(kinds), 0
    while len(common) > 1:
        weights: Counter[int] = Counter()
        for kind in common:  # the token -1 represents the end of an answer
            weights[kind[place] if place < len(kind) else -1] += kinds[kind]
        token = min(weights, key=lambda token: (-weights[token], token))
        if token < 0:
            common = [kind for kind in common if len(kind) == place]
        else:
            common = [kind for kind in common if len(kind) > place and kind[place] == token]
        place += 1
    return [*frequent, *(kind for kind in common if kind not in frequent)]


def _votes(voters: Sequence[Text], candidate: Text, beaten: int, rules: Rules) -> int:
    """Return how many answers agree with a candidate, or 0 if these cannot exceed `beaten`."""
    left = len(voters) - beaten
    for text in voters:
        if difference(text, candidate, rules) is not None:
            left -= 1
            if left <= 0:
                return 0
    return beaten + left


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    told = [row for row in rows if row]
    columns = zip(*told, strict=False)
    finite = ([value for value in column if isfinite(value)] for column in columns)
    return tuple(median(values) if values else nan for values in finite)
