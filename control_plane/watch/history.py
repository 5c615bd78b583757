"""The latest changes, with which watchers catch up. Pure.

All watchers share one bounded list instead of a queue per watcher. A watcher only stores its
version. If the list no longer contains that version, the watcher starts again from a snapshot.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delta:
    """A serialized WatchResponse that leads to `version` from the version before."""

    version: int
    payload: bytes
    has_removals: bool = False


def joined(deltas: Sequence[Delta], *, bytes_max: int = 256 * 1024) -> Iterator[Delta]:
    """Return the changes in as few messages as possible, for a slow reader.

    Concatenated messages parse as one message with all their objects. Readers apply the removals of
    a message before its upserts. So a message with removals must be the first of a merged message.

    Args:
        deltas: Deltas in order.
        bytes_max: Size limit of a merged message, in bytes.
    """
    row: list[Delta] = []
    row_bytes = 0
    for delta in deltas:
        if row and (delta.has_removals or row_bytes + len(delta.payload) > bytes_max):
            yield _join(row)
            row, row_bytes = [], 0
        row.append(delta)
        row_bytes += len(delta.payload)
    if row:
        yield _join(row)


def _join(row: list[Delta]) -> Delta:
    if len(row) == 1:
        return row[0]
    payload = b"".join(delta.payload for delta in row)
    return Delta(row[-1].version, payload, row[0].has_removals)


class History:
    """The deltas from version `base` to the newest version, limited in number and bytes."""

    def __init__(self, *, deltas_max: int = 4096, bytes_max: int = 64 * 1024 * 1024) -> None:
        self.base = 0
        self._deltas: deque[Delta] = deque()
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self._bytes = 0

    @property
    def version(self) -> int:
        """The newest version."""
        return self._deltas[-1].version if self._deltas else self.base

    def restart(self, version: int) -> None:
        """Drop all deltas, because the changes up to the new state's `version` are unknown."""
        self._deltas.clear()
        self._bytes = 0
        self.base = version

    def append(self, delta: Delta) -> None:
        """Append the next delta, and drop the oldest deltas above the limits."""
        assert delta.version > self.version, (delta.version, self.version)
        self._deltas.append(delta)
        self._bytes += len(delta.payload)
        while len(self._deltas) > self._deltas_max or self._bytes > self._bytes_max:
            oldest = self._deltas.popleft()
            self._bytes -= len(oldest.payload)
            self.base = oldest.version

    def since(self, version: int) -> list[Delta] | None:
        """Return the deltas after `version`, or None if a snapshot is necessary.

        A version between two versions of the history is valid, because deltas contain whole objects
        and a repeated change does no harm. A version above the newest version belongs to another
        database.
        """
        if not self.base <= version <= self.version:
            return None
        newer: list[Delta] = []
        for delta in reversed(self._deltas):
            if delta.version <= version:
                break
            newer.append(delta)
        newer.reverse()
        return newer
