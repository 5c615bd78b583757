"""Tracks offsets to detect messages that the broker deleted before they were read. Pure."""

from collections.abc import Iterable, Mapping

from telemetry.rows import BrokerMessage


class OffsetTracker:
    """The offset of the next message in every assigned partition of one topic."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def assign(self, committed: Mapping[int, int]) -> None:
        """Set the offsets of assigned partitions. A negative one means that none was committed."""
        for partition, offset in committed.items():
            self._next.pop(partition, None)
            if offset >= 0:
                self._next[partition] = offset

    def missing(self, messages: Iterable[BrokerMessage]) -> int:
        """Move the offsets past some messages, and return how many messages were missing.

        Request topics have neither transactions nor compaction, so the broker assigns consecutive
        offsets. So a gap means that the broker deleted messages before they were read.
        """
        count = 0
        for message in messages:
            expected = self._next.get(message.partition, message.offset)
            count += max(0, message.offset - expected)
            self._next[message.partition] = max(expected, message.offset + 1)
        return count
