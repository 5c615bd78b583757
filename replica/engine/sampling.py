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
Doubles = npt.NDArray[np.float64]
NO_TOKEN = -1  # where the best logit of a row is not finite
_GROUP = 64  # tokens; about the root of a vocabulary
_TEMPERATURE_MIN = np.float32(1e-6)  # below, float32 overflows; it is greedy long before
_BELOW_ONE = 1.0 - 2.0**-53
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def sample(logits: Floats, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Return one token id per row, NO_TOKEN where the best logit is not finite.

    Args:
        logits: Shape (rows, vocabulary).
        rows: Parameters, and the position of the token to choose, for each row.
    """
    drawn = [index for index, (sampling, _) in enumerate(rows) if sampling.temperature > 0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _best(logits)
    if drawn:
        chosen = _draw(logits[drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    return tokens


def _best(logits: Floats) -> list[int]:
    best = logits.argmax(axis=1)
    is_finite = np.isfinite(logits[np.arange(len(logits)), best])
    if not is_finite.all():
        best[~is_finite] = NO_TOKEN
    return best.tolist()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Doubles:
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


def _draw(logits: Floats, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    temperatures = np.array([sampling.temperature for sampling, _ in rows], np.float32)[:, None]
    best = logits.max(axis=1, keepdims=True)
    is_finite = np.isfinite(best)
    if not is_finite.all():
        tokens = np.full(len(rows), NO_TOKEN)
        good = np.flatnonzero(is_finite)
        if len(good):
            tokens[good] = _draw(logits[good], [rows[index] for index in good])
        return tokens.tolist()
    scaled = logits - best
    scaled *= 1 / np.maximum(temperatures, _TEMPERATURE_MIN)
    weights = np.exp(scaled, out=scaled)
    limited = [
        index for index, (sampling, _) in enumerate(rows) if sampling.top_k or sampling.top_p < 1
    ]
    if limited:
        weights[limited] = _truncated(weights[limited], [rows[index][0] for index in limited])
    draws = uniforms([sampling.seed for sampling, _ in rows], [position for _, position in rows])
    return _inverse(weights, draws).tolist()


def _inverse(weights: Floats, draws: Doubles) -> npt.NDArray[np.intp]:
    """Return, per row, the token at which the running sum of the weights passes the draw.

    In two levels, the group and then the token inside it: a running sum over a whole vocabulary
    for every row took longer than everything else in a step of the default model. Tokens and
    groups of weight 0 are never chosen, because a sum has to be passed, not reached.
    """
    count, vocabulary = weights.shape
    row = np.arange(count)
    if vocabulary % _GROUP:
        weights = np.pad(weights, ((0, 0), (0, -vocabulary % _GROUP)))
    groups = weights.reshape(count, -1, _GROUP)
    masses = np.einsum("ijk->ij", groups).astype(np.float64)  # a quarter of the time of sum()
    sums = masses.cumsum(axis=1)
    targets = draws * sums[:, -1]
    group = (sums <= targets[:, None]).sum(axis=1)
    left = (targets - (sums[row, group] - masses[row, group])) / masses[row, group]
    inside = groups[row, group].cumsum(axis=1, dtype=np.float64)
    # The mass of a group and the sum of its tokens differ in the last bits: stay inside.
    targets = np.clip(left, 0.0, _BELOW_ONE) * inside[:, -1]
    return group * _GROUP + (inside <= targets[:, None]).sum(axis=1)


def _truncated(weights: Floats, samplings: list[Sampling]) -> Floats:
    """Return the weights with 0 for tokens outside top_k or top_p; the best one always stays."""
    vocabulary = weights.shape[1]
    order = np.argsort(-weights, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    top_k = np.array([min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings])
    ranked[np.arange(vocabulary)[None, :] >= top_k[:, None]] = 0.0
    before = ranked.cumsum(axis=1, dtype=np.float64) - ranked  # of all that are more probable
    top_p = np.array([sampling.top_p for sampling in samplings])[:, None]
    is_outside = before >= top_p * ranked.sum(axis=1, keepdims=True)
    is_outside[:, 0] = False
    ranked[is_outside & (top_p < 1)] = 0.0
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, ranked, axis=1)
    return kept
