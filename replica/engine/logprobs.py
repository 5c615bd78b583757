"""Logarithms of the model's own distribution: of chosen tokens, of prompts, and the best ones."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.engine.types import TokenLogprobs

Floats = npt.NDArray[np.float32]
_BLOCK_ELEMENTS = 1 << 21  # 8 MiB per temporary array, however many rows a prompt has
_GROUP = 16  # elements per maximum in `least_of_top`; more would let more candidates through


def token_logprobs(
    logits: Floats, tokens: Sequence[int], tops: Sequence[int], keys: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the logprobs of one token per row.

    Args:
        logits: Shape (rows, vocabulary), as the model gave them.
        tokens: Chosen, or of the prompt.
        tops: How many of the best to report; equal ones by id.
        keys: Of the sequences.
    """
    entries: list[TokenLogprobs] = []
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(tokens), size):
        block = logits[begin : begin + size]
        sums = _log_sums(block)
        rows = np.arange(len(block))
        own = (block[rows, tokens[begin : begin + size]] - sums).tolist()
        for row, (logprob, total) in enumerate(zip(own, sums.tolist(), strict=True)):
            values = block[row]
            best = best_tokens(values, tops[begin + row]).tolist()
            top = tuple((token, float(values[token]) - total) for token in best)
            entries.append(TokenLogprobs(keys[begin + row], logprob, top))
    return entries


def best_tokens(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Return the ids of the `count` greatest values, best first, equal ones by id."""
    if count <= 0:
        return np.empty(0, np.intp)
    candidates = np.flatnonzero(values >= least_of_top(values, count))
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def least_of_top(values: Floats, count: int) -> np.float32:
    """Return a bound that the `count` greatest values reach, and few others.

    The maxima of disjoint groups: as many values as there are maxima above the bound reach it.
    Several times faster than to partition all values, which is exact.
    """
    groups = len(values) // _GROUP
    if groups < 2 * count:
        return np.float32(-np.inf) if count >= len(values) else np.partition(values, -count)[-count]
    # Strided groups, so that the maxima are taken of whole vectors.
    maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return np.partition(maxima, -count)[-count]


def _log_sums(logits: Floats) -> npt.NDArray[np.float64]:
    """Return per row the logarithm of the sum of exponentials, accumulated in float64."""
    best = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - best).sum(axis=1, dtype=np.float64)
    return best[:, 0].astype(np.float64) + np.log(sums)
