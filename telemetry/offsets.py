"""Tracks next offsets, to detect messages that the broker deleted before they were read. Pure."""

from collections.abc import Iterable, Mapping

from telemetry.rows import BrokerMessage


class OffsetTracker:
    """The next offset of every assigned partition of one topic."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def assign(self, committed: Mapping[int, int]) -> None:
        """Set the offsets of assigned partitions, negative for those without a committed offset."""
        for partition, offset in committed.items():
            self._next.pop(partition, None)
            if offset >= 0:
                self._next[partition] = offset

    def missing(self, messages: Iterable[BrokerMessage]) -> int:
        """Advance the offsets past messages, and return the number of messages missing in between.

        Request topics have neither transactions nor compaction, so the broker assigns consecutive
        offsets. A gap therefore means that the broker deleted messages before they were read.
        """
        count = 0
        for message in messages:
            expected = self._next.get(message.partition, message.offset)
            count += max(0, message.offset - expected)
            self._next[message.partition] = max(expected, message.offset + 1)
        return count
