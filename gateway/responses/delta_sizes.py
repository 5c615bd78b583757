"""The sizes of a stream's deltas, which are stored so that the stream can be sent again. Pure.

For each text of the output, the number of its deltas precedes the size of each delta. If the text
has log probabilities, their number in each delta follows. The size of a text is its bytes as JSON,
that of a call's arguments their characters. A byte of 255 adds 255 to the next number.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

# First byte of stored sizes, which differs from the mark of encrypted content.
FORMAT = b"1"
_MORE, _ESCAPED = 255, b"\xff"


def sizes_of(sizes: Sequence[int], told: Sequence[tuple[int, int]] = ()) -> bytes:
    """Return the stored form of one text.

    Args:
        sizes: Size of each delta.
        told: Position of each delta with log probabilities, and their number.
    """
    stored = _numbers((len(sizes),)) + _numbers(sizes)
    if not told:
        return stored
    counts = [0] * len(sizes)
    for position, count in told:
        counts[position] = count
    return stored + _numbers(counts)


class StoredSizes:
    """Reads stored sizes, text by text."""

    def __init__(self, stored: bytes) -> None:
        """The argument is empty for a stream whose texts have one delta each."""
        self._numbers = _read(stored[1:]) if stored.startswith(FORMAT) else None

    def next(self, size: int, logprobs: int) -> list[tuple[int, int]]:
        """Return the deltas of the next text, as sizes and numbers of log probabilities.

        Args:
            size: Size of the whole text.
            logprobs: Number of log probabilities of the whole text.
        """
        numbers = self._numbers
        if numbers is None:
            return [(size, logprobs)] if size else []
        count = next(numbers, 0)
        sizes = list(islice(numbers, count))
        counts = list(islice(numbers, count)) if logprobs else [0] * count
        return list(zip(sizes, counts, strict=True))


def _numbers(values: Sequence[int]) -> bytes:
    try:
        small = bytes(values)
    except ValueError:  # a number above 255
        small = _ESCAPED
    if _ESCAPED not in small:
        return small
    stored = bytearray()
    for value in values:
        times, rest = divmod(value, _MORE)
        stored += _ESCAPED * times
        stored.append(rest)
    return bytes(stored)


def _read(stored: bytes) -> Iterator[int]:
    value = 0
    for byte in stored:
        value += byte
        if byte != _MORE:
            yield value
            value = 0
