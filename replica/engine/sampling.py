"""Chooses next tokens for all rows of a step at once.

Order: temperature, top_k, top_p, one draw. The draw is a hash of (seed, position), not a generator
with state: the same seed gives the same token whatever else is in the batch, after a preemption,
and on another replica that goes on with prompt and emitted ids.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.engine.types import Sampling

Floats = npt.NDArray[np.float32]
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def sample(logits: Floats, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Return one token id per row.

    Args:
        logits: Shape (rows, vocabulary).
        rows: Parameters, and the position of the token to choose, for each row.
    """
    tokens: list[int] = logits.argmax(axis=1).tolist()
    drawn = [index for index, (sampling, _) in enumerate(rows) if sampling.temperature > 0]
    if drawn:
        chosen = _draw(logits[drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    return tokens


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): SplitMix64 of both."""
    with np.errstate(over="ignore"):  # 64-bit arithmetic is meant to wrap
        state = _mix(np.array([seed & (1 << 64) - 1 for seed in seeds], np.uint64))
        state = _mix(state + np.array(positions, np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    increment, first, second = (np.uint64(constant) for constant in _SPLITMIX)
    state = state + increment
    state = (state ^ (state >> np.uint64(30))) * first
    state = (state ^ (state >> np.uint64(27))) * second
    return state ^ (state >> np.uint64(31))


def _draw(logits: Floats, rows: list[tuple[Sampling, int]]) -> list[int]:
    temperatures = np.array([sampling.temperature for sampling, _ in rows])[:, None]
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperatures
    weights = np.exp(scaled)  # float64: the sums below must not lose rare tokens
    limited = [
        index for index, (sampling, _) in enumerate(rows) if sampling.top_k or sampling.top_p < 1
    ]
    if limited:
        weights[limited] = _truncated(weights[limited], [rows[index][0] for index in limited])
    sums = weights.cumsum(axis=1)
    draws = uniforms([sampling.seed for sampling, _ in rows], [position for _, position in rows])
    # Searching from the right skips tokens of weight 0, also where the draw is 0 itself.
    return [
        int(np.searchsorted(row, draw * row[-1], side="right"))
        for row, draw in zip(sums, draws, strict=True)
    ]


def _truncated(
    weights: npt.NDArray[np.float64], samplings: list[Sampling]
) -> npt.NDArray[np.float64]:
    """Return the weights with 0 for tokens outside top_k or top_p; the best one always stays."""
    vocabulary = weights.shape[1]
    order = np.argsort(-weights, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    top_k = np.array([min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings])
    ranked[np.arange(vocabulary)[None, :] >= top_k[:, None]] = 0.0
    before = ranked.cumsum(axis=1) - ranked  # of all that are more probable
    top_p = np.array([sampling.top_p for sampling in samplings])[:, None]
    is_outside = before >= top_p * ranked.sum(axis=1, keepdims=True)
    is_outside[:, 0] = False
    ranked[is_outside & (top_p < 1)] = 0.0
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, ranked, axis=1)
    return kept
