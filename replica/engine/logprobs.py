"""Computes logprobs of output and prompt tokens, and the best tokens, before sampling changes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.engine.types import TokenLogprobs

Floats = npt.NDArray[np.float32]
# Elements of a temporary array, 8 MiB, which does not grow with the rows of a prompt
_BLOCK_ELEMENTS = 1 << 21
# Elements per group in `least_of_top`. Larger groups would admit more candidates.
_GROUP = 16


def token_logprobs(
    logits: Floats, tokens: Sequence[int], tops: Sequence[int], keys: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the logprobs of one token per row, and of the row's best tokens.

    Args:
        logits: Logits of the model, shape (rows, vocabulary).
        tokens: Token of each row, which is an output token or a prompt token.
        tops: Number of best tokens to report per row. Equal logits are ordered by token id.
        keys: Key of the sequence of each row.
    """
    entries: list[TokenLogprobs] = []
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(tokens), size):
        part = slice(begin, begin + size)
        block = logits[part]
        sums = _log_sums(block)
        own = (block[np.arange(len(block)), tokens[part]] - sums).tolist()
        best = best_tokens(block, max(tops[part]))
        values = (np.take_along_axis(block, best, axis=1) - sums[:, None]).tolist()
        for key, logprob, ids, logprobs, top in zip(
            keys[part], own, best.tolist(), values, tops[part], strict=True
        ):
            entries.append(
                TokenLogprobs(key, logprob, tuple(zip(ids[:top], logprobs[:top], strict=True)))
            )
    return entries


def score_tokens(logits: Floats, tokens: Sequence[int], key: int) -> list[TokenLogprobs]:
    """Return logprob and entropy of one token per row, for rows of one sequence."""
    entries: list[TokenLogprobs] = []
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(tokens), size):
        part = slice(begin, begin + size)
        block = logits[part].astype(np.float64)
        sums = _log_sums(logits[part])
        own = block[np.arange(len(block)), tokens[part]] - sums
        weights = np.exp(block - sums[:, None])
        entropies = sums - (weights * np.where(weights > 0, block, 0.0)).sum(axis=1)
        entries += [
            TokenLogprobs(key, logprob, entropy=max(0.0, entropy))
            for logprob, entropy in zip(own.tolist(), entropies.tolist(), strict=True)
        ]
    return entries


def best_tokens(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Return the ids of the greatest values per row, best first. Equal values are ordered by id.

    Args:
        values: Values, shape (rows, vocabulary).
        count: Number of ids to return per row, or 0 for none.
    """
    count = max(0, min(count, values.shape[1]))
    if not count:
        return np.zeros((len(values), 0), np.intp)
    # Every comparison with NaN is false, so NaN counts as a candidate and the shape stays.
    is_candidate = ~(values < least_of_top(values, count)[:, None])
    rows, ids = np.divmod(np.flatnonzero(is_candidate), values.shape[1])
    order = np.lexsort((ids, -values[rows, ids], rows))
    begins = np.searchsorted(rows, np.arange(len(values)))
    return ids[order[begins[:, None] + np.arange(count)]]


def least_of_top(values: Floats, count: int) -> Floats:
    """Return a value per row that at least `count` elements reach, and few others.

    The value is the `count`-th greatest of the maxima of disjoint groups, so `count` elements reach
    it. This is several times faster than an exact partition of all elements.
    """
    rows, vocabulary = values.shape
    groups = vocabulary // _GROUP
    if groups < 2 * count:
        return np.partition(values, vocabulary - count, axis=1)[:, vocabulary - count]
    # A group consists of every n-th element, so numpy computes maxima over whole vectors.
    maxima = values[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(axis=1)
    return np.partition(maxima, groups - count, axis=1)[:, groups - count]


def _log_sums(logits: Floats) -> npt.NDArray[np.float64]:
    """Return the logarithm of the sum of exponentials per row, accumulated in float64."""
    best = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - best)
    # A group is summed in float32, which is much faster. The groups' sums are added in float64.
    vocabulary = weights.shape[1]
    whole = vocabulary - vocabulary % _GROUP
    parts = np.einsum("ijk->ij", weights[:, :whole].reshape(len(weights), -1, _GROUP))
    sums = parts.sum(axis=1, dtype=np.float64) + weights[:, whole:].sum(axis=1, dtype=np.float64)
    return best[:, 0].astype(np.float64) + np.log(sums)
