import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.sampling import sample, uniforms
from replica.engine.types import Sampling

VOCABULARY = 50


def logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 40, 1000]),
        seed=st.integers(0, 2**64 - 1),
    )


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(samplings(), st.integers(0, 5000)), min_size=1, max_size=12))
def test_a_row_does_not_depend_on_its_batch(rows: list[tuple[Sampling, int]]) -> None:
    values = logits(len(rows))
    together = sample(values, rows)
    alone = [sample(values[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    order = list(reversed(range(len(rows))))
    turned = sample(values[order], [rows[i] for i in order])
    assert turned == [together[i] for i in order]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=0.0, top_k=5), 1),
        (Sampling(temperature=1.0, top_k=1), 1),
        (Sampling(temperature=1.0, top_p=1e-9), 1),
        (Sampling(temperature=1.0, top_k=3), 3),
        (Sampling(temperature=100.0, top_k=7), 7),
    ],
)
def test_only_the_best_tokens_are_drawn(sampling: Sampling, allowed: int) -> None:
    values = logits(1)
    best = set(np.argsort(-values[0])[:allowed].tolist())
    drawn = {sample(values, [(sampling, position)])[0] for position in range(300)}
    assert drawn == best


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = np.array([[0.5, 0.3, 0.15, 0.05]])
    values = np.log(probabilities).astype(np.float32)
    for top_p, allowed in ((0.45, {0}), (0.75, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        rows = [(Sampling(temperature=1.0, top_p=top_p), i) for i in range(400)]
        assert set(sample(np.repeat(values, 400, axis=0), rows)) == allowed


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    values = np.repeat(np.log(probabilities)[None].astype(np.float32), count, axis=0)
    drawn = sample(values, [(Sampling(temperature=1.0, seed=9), i) for i in range(count)])
    shares = np.bincount(drawn, minlength=4) / count
    assert np.abs(shares - probabilities).max() < 0.015


def test_uniforms_are_reproducible_spread_and_below_one() -> None:
    seeds = [seed for seed in range(100) for _ in range(100)]
    positions = [position for _ in range(100) for position in range(100)]
    numbers = uniforms(seeds, positions)
    assert (numbers == uniforms(seeds, positions)).all()
    assert len(set(numbers.tolist())) == len(numbers)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10)[0] - 1000).max() < 150
    assert uniforms([2**64 - 1], [3]).tolist() == uniforms([-1], [3]).tolist()


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    values = np.full((1, 4), -np.inf, np.float32)
    values[0, 2] = 0.0
    assert {sample(values, [(Sampling(temperature=1.0), i)])[0] for i in range(100)} == {2}


@given(
    vocabulary=st.integers(1, 400),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([1e-7, 0.3, 1.0, 2.0]),
)
def test_the_two_level_search_equals_one_running_sum(
    vocabulary: int, seed: int, temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, (3, vocabulary)).astype(np.float32)
    rows = [(Sampling(temperature=temperature, seed=seed + row), row) for row in range(3)]
    draws = uniforms([seed + row for row in range(3)], range(3))
    for row, token in enumerate(sample(logits, rows)):
        scaled = (logits[row] - logits[row].max()).astype(np.float64) / max(temperature, 1e-6)
        running = np.exp(scaled).cumsum() / np.exp(scaled).sum()
        below = running[token - 1] if token else 0.0
        assert below - 1e-5 <= draws[row] <= running[token] + 1e-5
