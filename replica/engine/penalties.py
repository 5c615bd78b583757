"""Changes logits before sampling by penalties, bias and bans of tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.engine.types import Sampling

Ids = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float32]


def has_penalties(sampling: Sampling) -> bool:
    """Whether the sampling parameters have a penalty, which requires counts of the tokens."""
    return bool(
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )


class PenaltyCounts:
    """The number of occurrences of each emitted token of a sequence, for penalties.

    A step only counts its new tokens, so its time does not grow with the length of the sequence.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """Begin with count 0 for each token of `prompt`. Empty if no penalty depends on it."""
        self._prompt_index = {token: at for at, token in enumerate(dict.fromkeys(prompt))}
        self._index: dict[int, int] = {}  # token -> index, for tokens that are not in the prompt
        self._size = len(self._prompt_index)
        self._ids = np.zeros(max(64, 2 * self._size), np.intp)
        self._ids[: self._size] = list(self._prompt_index)
        self._counts = np.zeros(len(self._ids), np.float32)

    def copy(self) -> "PenaltyCounts":
        """Return separate counts for a sibling. Both share the prompt's index, which is large."""
        other = PenaltyCounts(())
        other._prompt_index = self._prompt_index
        other._index = self._index.copy()
        other._size = self._size
        other._ids = self._ids.copy()
        other._counts = self._counts.copy()
        return other

    def add(self, tokens: Sequence[int]) -> None:
        """Count emitted tokens."""
        for token in tokens:
            at = self._at(token)
            if at is None:
                at = self._index[token] = self._size
                if at == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[at] = token
                self._size += 1
            self._counts[at] += 1

    def view(self, ahead: Sequence[int] = ()) -> tuple[Ids, Floats]:
        """Return (ids, counts) as if the tokens `ahead` were also emitted. Both are read-only."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        if not ahead:
            return ids, counts
        fresh = [token for token in dict.fromkeys(ahead) if self._at(token) is None]
        at = {token: self._size + i for i, token in enumerate(fresh)}
        ids = np.concatenate([ids, np.array(fresh, np.intp)])
        counts = np.concatenate([counts, np.zeros(len(fresh), np.float32)])
        for token in ahead:
            counts[at.get(token, self._at(token))] += 1
        return ids, counts

    def _at(self, token: int) -> int | None:
        at = self._prompt_index.get(token)
        return self._index.get(token) if at is None else at


class Changes:
    """The changes of a step to the logits of some rows. `apply` makes all of them at once."""

    def __init__(self) -> None:
        self._penalized: list[tuple[int, Sampling, Ids, Floats]] = []
        self._biased: list[tuple[int, Ids, Floats]] = []
        self._banned: list[tuple[int, Ids]] = []

    def penalize(self, row: int, sampling: Sampling, counts: tuple[Ids, Floats]) -> None:
        """Add the three penalties for the counted tokens of a row."""
        if len(counts[0]):
            self._penalized.append((row, sampling, *counts))

    def bias(self, row: int, ids: Ids, values: Floats) -> None:
        """Add a value to some logits of a row. The `ids` must be distinct."""
        self._biased.append((row, ids, values))

    def ban(self, row: int, ids: Ids) -> None:
        """Forbid some tokens in a row."""
        self._banned.append((row, ids))

    def apply(self, logits: Floats) -> None:
        """Change `logits` in place, in the order that `replica.engine.sampling` defines."""
        if self._penalized:
            self._apply_penalties(logits)
        if self._biased:
            rows = np.repeat(*_lengths(self._biased))
            ids = np.concatenate([ids for _, ids, _ in self._biased])
            logits[rows, ids] += np.concatenate([values for _, _, values in self._biased])
        if self._banned:
            rows = np.repeat(*_lengths(self._banned))
            logits[rows, np.concatenate([ids for _, ids in self._banned])] = -np.inf

    def _apply_penalties(self, logits: Floats) -> None:
        rows, lengths = _lengths(self._penalized)
        at = np.repeat(rows, lengths), np.concatenate([ids for _, _, ids, _ in self._penalized])
        counts = np.concatenate([counts for _, _, _, counts in self._penalized])
        columns = np.array(
            [
                (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                for _, s, _, _ in self._penalized
            ],
            np.float32,
        )
        repetition, frequency, presence = np.repeat(columns, lengths, axis=0).T
        values = logits[at]
        values = np.where(values > 0, values / repetition, values * repetition)
        logits[at] = values - (frequency * counts + presence * (counts > 0))


def _lengths(entries: Sequence[tuple[int, *tuple[object, ...]]]) -> tuple[Ids, Ids]:
    """Return the row of each entry, and the number of token ids in each entry."""
    rows = np.array([entry[0] for entry in entries], np.intp)
    arrays = [next(part for part in entry if isinstance(part, np.ndarray)) for entry in entries]
    return rows, np.array([len(array) for array in arrays], np.intp)
