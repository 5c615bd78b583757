"""Flaws of answers: none of ordinary text, however lively; all of garbage, whatever its period."""

from array import array
from random import Random

import pytest

from gateway.rollouts.flaws import TOKENS_MAX, Flaws, flaws_of, is_repetitive


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_an_endless_loop_is_repetitive(period: int):
    loop = array("I", list(range(period)) * 100)
    assert is_repetitive(loop[: max(8, 3 * period)])
    assert is_repetitive(array("I", [900, 901, 902]) + loop), "after a good beginning"


def test_ordinary_text_is_not():
    draw = Random(1)
    frequent = [int(draw.paretovariate(0.7)) for _ in range(4_000)]  # words as frequent as in prose
    for length in (8, 40, 200):
        answers = [frequent[start : start + length] for start in range(0, 4_000, length)]
        found = sum(is_repetitive(answer) for answer in answers)
        assert found <= len(answers) / 50
    once = list(range(60))
    assert not is_repetitive(once + once[:20]), "a quotation"


def test_few_tokens_say_nothing():
    assert not is_repetitive([7] * 7)
    assert is_repetitive([7] * 8)
    assert not is_repetitive([])


def test_only_the_first_tokens_are_looked_at():
    assert not is_repetitive([*range(TOKENS_MAX), *[1] * 100_000])


def test_an_answer_is_empty_without_content_reasoning_and_calls():
    assert flaws_of(" \n", [1], has_more=False) == Flaws(is_empty=True)
    assert flaws_of("", [], has_more=False) == Flaws(is_empty=True)
    assert flaws_of("", [1, 2], has_more=True) == Flaws()
    assert flaws_of("Yes.", [1, 2], has_more=False) == Flaws()


def test_a_refusal_is_one_more_flaw():
    assert flaws_of("I'm sorry, but I can't.", [1, 2], has_more=False) == Flaws(is_refusal=True)
