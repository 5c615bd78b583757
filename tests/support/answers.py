"""Answers of sound and of corrupt engines, for tests of the detector and of the quality guard."""

import random
from math import log

from hypothesis import strategies as st

from sluice.detector.consensus import Text

TOKENS = tuple(range(100, 116))
SURE = tuple([-0.1] * len(TOKENS))
SEEDS = st.integers(0, 2**32)


def honest(rng: random.Random, fork: int | None, noise: float = 0.05) -> Text:
    """An answer whose token at `fork` is one of two that are almost equally probable."""
    tokens = list(TOKENS)
    logprobs = [value + rng.gauss(0, noise) for value in SURE]
    if fork is not None:
        logprobs[fork] = log(0.48) + rng.uniform(-0.1, 0.1)
        if rng.random() < 0.5:
            tokens[fork:] = [token + 500 for token in tokens[fork:]]
            logprobs[fork + 1 :] = [value - 0.7 for value in logprobs[fork + 1 :]]
    return Text(tuple(tokens), tuple(logprobs))


def corrupt(rng: random.Random) -> Text:
    """What bit flips make of an answer: other tokens, and the engine is sure of them."""
    at = rng.randrange(len(TOKENS))
    tokens = [*TOKENS[:at], *(rng.randrange(1000, 2000) for _ in TOKENS[at:])]
    return Text(tuple(tokens), SURE)
