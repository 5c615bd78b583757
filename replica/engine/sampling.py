"""Chooses the next tokens of many rows at once, and defines the order of all sampling steps.

1. Logprobs are computed from the model's own distribution, before any of the following steps.
2. Logits of tokens in the prompt or the output are divided by `repetition_penalty` if positive, and
   multiplied by it if negative.
3. From the logit of an emitted token, `frequency_penalty` is subtracted once per occurrence, and
   `presence_penalty` is subtracted once. Tokens of the prompt do not count as occurrences.
4. `logit_bias` is added.
5. Until `tokens_min` tokens are emitted, the end-of-sequence and stop ids are forbidden. The
   exception is a complete grammar that permits no other token.
6. The grammar forbids tokens that cannot follow. End-of-sequence and stop ids are permitted only
   where the text so far is complete.
7. At `temperature` 0 the most probable token is chosen, and of equal ones that with the lowest id.
   At other temperatures, the logits are divided by the temperature.
8. `top_k`, then `top_p` of the remaining tokens, then `min_p` are applied. The best token always
   remains. SGLang and Transformers use the same order. In vLLM, min_p is first, which differs only
   if top_p is also used, and the bias precedes the penalties.
9. One random number selects the token. It is a hash of (seed, position), not a generator with
   state. So a seed selects the same token in any batch, after a preemption, and on another replica
   that resumes from prompt and emitted ids.

This module performs steps 7 to 9. `replica.engine.sampler` performs the other steps and calls this
module.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.engine.logprobs import least_of_top
from replica.engine.types import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
NO_TOKEN = -1  # result for a row whose best logit is not finite
_GROUP = 64  # tokens per group, near the square root of a vocabulary's size
# Lowest temperature by which logits are divided, because float32 would overflow below it. Sampling
# is already greedy at this temperature.
_TEMPERATURE_MIN = np.float32(1e-6)
_BELOW_ONE = 1.0 - 2.0**-53
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def sample(logits: Floats, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Return one token id per row, or NO_TOKEN if the row's best logit is not finite.

    Args:
        logits: Logits of shape (rows, vocabulary). Forbidden tokens have minus infinity.
        rows: For each row, the sampling parameters and the position of the token to choose.
    """
    if not rows:  # a step may have rows for logprobs of a prompt only
        return []
    drawn = [index for index, (sampling, _) in enumerate(rows) if sampling.temperature > 0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _best(logits)
    if drawn:
        chosen = _draw(logits[drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    return tokens


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Doubles:
    """Return one number in [0, 1) per (seed, position), as a SplitMix64 hash of the pair."""
    with np.errstate(over="ignore"):  # the 64-bit products and sums overflow on purpose
        state = _mix(np.array([seed & (1 << 64) - 1 for seed in seeds], np.uint64))
        state = _mix(state + np.array(positions, np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    increment, first, second = (np.uint64(constant) for constant in _SPLITMIX)
    state = state + increment
    state = (state ^ (state >> np.uint64(30))) * first
    state = (state ^ (state >> np.uint64(27))) * second
    return state ^ (state >> np.uint64(31))


def _best(logits: Floats) -> list[int]:
    best = logits.argmax(axis=1)
    values = logits[np.arange(len(logits)), best]
    if not np.isfinite(values.sum()):  # one sum is cheaper than a check of each value
        best[~np.isfinite(values)] = NO_TOKEN
    return best.tolist()


def _draw(logits: Floats, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    best = logits.max(axis=1, keepdims=True)
    is_finite = np.isfinite(best)
    if not is_finite.all():
        tokens = np.full(len(rows), NO_TOKEN)
        good = np.flatnonzero(is_finite)
        if len(good):
            tokens[good] = _draw(logits[good], [rows[index] for index in good])
        return tokens.tolist()
    temperatures = np.array([sampling.temperature for sampling, _ in rows], np.float32)[:, None]
    scaled = logits - best
    scaled *= 1 / np.maximum(temperatures, _TEMPERATURE_MIN)
    weights = np.exp(scaled, out=scaled)
    for row, (sampling, _) in zip(weights, rows, strict=True):
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            _truncate(row, sampling)
    draws = uniforms([sampling.seed for sampling, _ in rows], [position for _, position in rows])
    return _inverse(weights, draws).tolist()


def _inverse(weights: Floats, draws: Doubles) -> npt.NDArray[np.intp]:
    """Return, per row, the first token at which the running sum of the weights exceeds the draw.

    The search has two levels, first the group and then the token in the group. A running sum over a
    whole vocabulary took longer than the other work of a step of the default model. Tokens and
    groups of weight 0 are never chosen, because the sum must exceed the draw, not equal it.
    """
    count, vocabulary = weights.shape
    row = np.arange(count)
    if vocabulary % _GROUP:
        weights = np.pad(weights, ((0, 0), (0, -vocabulary % _GROUP)))
    groups = weights.reshape(count, -1, _GROUP)
    # einsum takes a quarter of the time of sum()
    masses = np.einsum("ijk->ij", groups).astype(np.float64)
    sums = masses.cumsum(axis=1)
    targets = draws * sums[:, -1]
    group = (sums <= targets[:, None]).sum(axis=1)
    left = (targets - (sums[row, group] - masses[row, group])) / masses[row, group]
    inside = groups[row, group].cumsum(axis=1, dtype=np.float64)
    # The sum of a group and the sum of its tokens differ by rounding, so the target is clipped.
    targets = np.clip(left, 0.0, _BELOW_ONE) * inside[:, -1]
    return group * _GROUP + (inside <= targets[:, None]).sum(axis=1)


def _truncate(weights: Floats, sampling: Sampling) -> None:
    """Set weights of one row to 0 where top_k, top_p or min_p exclude the token.

    The best token has weight 1. Only tokens that may remain are sorted, usually few. For top_p,
    tokens below a bound cannot remain. The bound is the sum that top_p excludes, divided by the
    number of tokens.
    """
    vocabulary = len(weights)
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, np.float32(sampling.min_p)
    has_top_k = 0 < top_k < vocabulary
    if not has_top_k and top_p >= 1:
        weights *= weights >= min_p
        return
    total = 0.0
    low = min_p
    if has_top_k:
        low = least_of_top(weights[None], top_k)[0]
    elif top_p < 1:
        total = float(weights.sum(dtype=np.float64))
        low = max(low, np.float32((1 - top_p) * total / vocabulary * (1 - 1e-6)))
    ranked = np.sort(weights[weights >= low])[::-1]
    if has_top_k:
        ranked = ranked[:top_k]
        total = float(ranked.sum(dtype=np.float64))
    if top_p < 1:
        # sum of the weights of all more probable tokens
        before = ranked.cumsum(dtype=np.float64) - ranked
        ranked = ranked[: max(1, int(np.searchsorted(before, top_p * total)))]
    least = max(ranked[-1], min_p)
    stays = weights >= least
    extra = np.count_nonzero(stays) - np.count_nonzero(ranked >= least)
    if extra:  # of equally probable tokens, the lowest ids remain
        stays[np.flatnonzero(weights == least)[-extra:]] = False
    weights *= stays
