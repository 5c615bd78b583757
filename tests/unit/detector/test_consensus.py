"""The vote of the detector: what a majority says is right, near ties and liars notwithstanding."""

import random
from math import log

from hypothesis import given
from hypothesis import strategies as st

from sluice.detector import consensus as module
from sluice.detector.consensus import CANDIDATES_MAX, Difference, Text, consensus, difference
from tests.support.answers import SEEDS, SURE, TOKENS, corrupt, honest


def test_a_near_tie_is_one_only_where_neither_token_is_probable() -> None:
    def forked(logprob: float, token: int) -> Text:
        return Text((*TOKENS[:3], token, 7, 8), (-0.1, -0.1, -0.1, logprob, -0.1, -0.1))

    assert difference(forked(-0.75, 1), forked(-0.8, 2)) is None
    assert difference(forked(-0.1, 1), forked(-0.1, 2)) is Difference.TOKENS, "both are sure"
    assert difference(forked(-0.7, 1), forked(-1.5, 2)) is Difference.TOKENS
    silent = Text(forked(-0.75, 1).token_ids)
    assert difference(silent, forked(-0.8, 2)) is Difference.TOKENS, "nothing says that it is one"
    assert difference(Text(TOKENS[:5]), Text(TOKENS)) is Difference.TOKENS, "cut short"


def test_no_majority_of_fewer_than_three() -> None:
    assert consensus([Text((1,)), Text((1,))]) is None
    assert consensus([Text((1,)), Text((2,)), Text((1,))]) == Text((1,))


def test_a_vote_costs_the_number_of_voters_at_any_disagreement(monkeypatch) -> None:
    compared = 0
    honest_difference = module.difference

    def counted(*args):
        nonlocal compared
        compared += 1
        return honest_difference(*args)

    monkeypatch.setattr(module, "difference", counted)
    voters = [Text((number, *TOKENS), (-0.01,) * 17) for number in range(600)]
    assert consensus(voters) is None
    assert compared <= CANDIDATES_MAX * len(voters)


def test_a_majority_of_near_ties_is_found_among_agreeing_liars() -> None:
    near = (*SURE[:4], *[log(0.4)] * 12)
    honest_ones = [Text((*TOKENS[:4], *range(n, n + 12)), near) for n in range(1000, 1120)]
    liars = [Text((900 - n // 2, *TOKENS[1:]), SURE) for n in range(100)]
    found = consensus([*liars, *honest_ones])
    assert found is not None
    assert found.token_ids[:4] == TOKENS[:4]
    assert all(difference(text, found) is None for text in honest_ones)


@given(seed=SEEDS, count=st.integers(3, 40))
def test_the_order_of_voters_decides_nothing(seed, count) -> None:
    rng = random.Random(seed)
    voters = [honest(rng, rng.choice([None, 3])) for _ in range(count)]
    voters += [corrupt(rng) for _ in range(rng.randrange(count))]
    found = consensus(voters)
    rng.shuffle(voters)
    again = consensus(voters)
    assert found == again
