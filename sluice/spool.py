"""A bounded append-only spool on disk, for records that a broker does not accept now.

A root directory contains numbered slots, one per process, each protected by a lock file. A slot
contains segment files, whose names sort by age. A record is its length and CRC-32 (both u32, little
endian), followed by the payload. After a restart no record is appended to an old segment, so a
crash can only damage the record that was being written.

A spool must be used by one thread only. Records survive a crash of the process, but a power failure
may lose the last seconds.
"""

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<II")
_SUFFIX = ".spool"
# Largest plausible record in bytes, far above any event. A greater length means a damaged file.
RECORD_MAX_BYTES = 4 << 20
_SLOTS_MAX = 1024
# Most attempts per write to free space by emptying segments of the lesser spool. An attempt fails
# if other processes use the freed space.
_EVICTIONS_MAX = 3


def encode_record(payload: bytes) -> bytes:
    """Return the encoded record of a payload."""
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of `decode_records`.

    Attributes:
        payloads: Payloads of intact records, in order.
        end: Offset after the last examined record, from which to continue.
        damaged: Number of records with a wrong checksum, including an incomplete last record.
    """

    payloads: list[bytes]
    end: int
    damaged: int


def decode_records(data: bytes, start: int = 0, limit: int | None = None) -> Decoded:
    """Decode up to `limit` intact records of `data` from offset `start`.

    A record with a wrong checksum is skipped. After an impossible length, the rest of `data` is
    skipped.
    """
    payloads: list[bytes] = []
    damaged = 0
    at = start
    while at < len(data) and (limit is None or len(payloads) < limit):
        body = at + _HEADER.size
        length, crc = _HEADER.unpack_from(data, at) if body <= len(data) else (0, -1)
        if crc < 0 or length > RECORD_MAX_BYTES or body + length > len(data):
            return Decoded(payloads, len(data), damaged + 1)
        payload = data[body : body + length]
        if zlib.crc32(payload) == crc:
            payloads.append(payload)
        else:
            damaged += 1
        at = body + length
    return Decoded(payloads, at, damaged)


class Spool:
    """The segments of one slot, with `append` at the end, and `peek` and `advance` at the front.

    Attributes:
        size_bytes: Bytes on disk, including already replayed records of the first segment. Other
            threads may read this size and the counters.
        dropped: Records lost because the bound was reached or the disk was full.
        damaged: Records that could not be read back.
        is_refused: Whether the last write failed in part, and nothing was deleted since.
        evicted: Records of the lesser spool that were deleted to make room.
    """

    def __init__(
        self, root: Path, *, max_bytes: int, segment_bytes: int, lesser: Path | None = None
    ) -> None:
        """Lock the first free slot under `root`, and move the segments of other free slots there.

        Args:
            root: Directory of all slots.
            max_bytes: Largest size of this slot.
            segment_bytes: Largest size of one file.
            lesser: Root of a spool of less important records on the same disk. On a full disk its
                records, in all slots, are deleted before a record of this spool is lost.

        Raises:
            OSError: `root` cannot be written.
            RuntimeError: Every slot is locked by another process.
        """
        assert 0 < segment_bytes <= max_bytes, (segment_bytes, max_bytes)
        self.dropped = 0
        self.damaged = 0
        self.is_refused = False
        self.evicted = 0
        self._lesser = lesser
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._slot, self._lock = _claim_slot(root)
        _adopt(root, self._slot)
        self._sizes = {path: path.stat().st_size for path in _segments(self._slot)}
        self.size_bytes = sum(self._sizes.values())
        self._writer: int | None = None
        self._writing: Path | None = None
        self._read_at = 0
        self._peeked: tuple[int, int] = (0, 0)

    @property
    def is_empty(self) -> bool:
        """Whether the spool has no records left."""
        return not self._sizes

    @property
    def is_all_peeked(self) -> bool:
        """Whether the last `peek` returned all records."""
        return len(self._sizes) == 1 and self._peeked[0] >= next(iter(self._sizes.values()))

    def append(self, payloads: Iterable[bytes]) -> int:
        """Append records, and return the number of written records.

        Above the size bound, the oldest segments are deleted. On a full disk the lesser spool is
        emptied, and records that still do not fit are lost. All lost records of this spool are
        counted in `dropped`.
        """
        batch: list[bytes] = []
        written = pending = 0
        for payload in payloads:
            record = encode_record(payload)
            if batch and pending + len(record) > self._segment_bytes:
                written += self._write(batch)
                batch, pending = [], 0
            batch.append(record)
            pending += len(record)
        return written + (self._write(batch) if batch else 0)

    def peek(self, limit: int) -> list[bytes]:
        """Return at most `limit` of the oldest records, from one segment, if there are any."""
        while self._sizes:
            first = next(iter(self._sizes))
            if first == self._writing:
                self._close_writer()
            try:
                data = first.read_bytes()
            except OSError:
                self.damaged += 1
                data = b""
            found = decode_records(data, self._read_at, limit)
            if found.payloads:
                self._peeked = (found.end, found.damaged)
                return found.payloads
            self.damaged += found.damaged
            self._delete(first)
        self.is_refused = False
        return []

    def advance(self) -> None:
        """Mark the records of the last `peek` as read, and delete a completely read segment."""
        if not self._sizes or self._peeked[0] == 0:
            return
        first = next(iter(self._sizes))
        self._read_at, damaged = self._peeked
        self._peeked = (0, 0)
        self.damaged += damaged
        if self._read_at >= self._sizes[first]:
            self._delete(first)

    def clear(self) -> None:
        """Delete all records, and count unread records in `dropped`."""
        while self._sizes:
            first = next(iter(self._sizes))
            with suppress(OSError):
                self.dropped += len(decode_records(first.read_bytes(), self._read_at).payloads)
            self._delete(first)

    @property
    def is_tight(self) -> bool:
        """Whether the spool is more than half full, or the disk is full."""
        return self.is_refused or self.size_bytes * 2 > self._max_bytes

    def close(self) -> None:
        """Unlock the slot, whose records remain for its next owner."""
        self._close_writer()
        os.close(self._lock)

    def _write(self, records: list[bytes]) -> int:
        written = self._written(records)
        self.is_refused = written < len(records)
        for _ in range(_EVICTIONS_MAX):
            if written == len(records) or not self._evict():
                break
            written += self._written(records[written:])
        self.dropped += len(records) - written
        return written

    def _written(self, records: list[bytes]) -> int:
        """Write as many records as fit on the disk, and return their number."""
        data = b"".join(records)
        self._make_room(len(data))
        try:
            fd, path = self._open_segment(len(data))
            done = os.write(fd, data)
        except OSError:
            self._give_up_segment()
            return 0
        self._sizes[path] += done
        self.size_bytes += done
        if done == len(data):
            return len(records)
        # The disk is full. Complete records are counted, and readers skip the incomplete last one.
        self._close_writer()
        return len(decode_records(data[:done]).payloads)

    def _evict(self) -> bool:
        """Empty all segments of the lesser spool, and return whether that freed space."""
        made_room = False
        for segment in self._lesser.glob(f"*/*{_SUFFIX}") if self._lesser is not None else ():
            with suppress(OSError):
                data = segment.read_bytes()
                # The segment is truncated, not deleted, because the space of a deleted file is not
                # freed while its owner has it open. To the owner the segment seems completely read.
                os.truncate(segment, 0)
                made_room = made_room or bool(data)
                self.evicted += len(decode_records(data).payloads)
        return made_room

    def _open_segment(self, incoming: int) -> tuple[int, Path]:
        path, fd = self._writing, self._writer
        if path is not None and self._sizes[path] + incoming > self._segment_bytes:
            self._close_writer()
            path = fd = None
        if path is None or fd is None:
            newest = max((int(p.stem) for p in self._sizes), default=0)
            path = self._slot / f"{max(newest + 1, time.time_ns()):020d}{_SUFFIX}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._writer, self._writing = fd, path
            self._sizes[path] = 0
        return fd, path

    def _give_up_segment(self) -> None:
        """Close a segment that could not be written, and delete it if it is empty."""
        path = self._writing
        self._close_writer()
        if path is not None and not self._sizes[path]:
            with suppress(OSError):
                path.unlink()
            del self._sizes[path]

    def _make_room(self, incoming: int) -> None:
        while self._sizes and self.size_bytes + incoming > self._max_bytes:
            first = next(iter(self._sizes))
            with suppress(OSError):
                self.dropped += len(decode_records(first.read_bytes(), self._read_at).payloads)
            self._delete(first)

    def _delete(self, first: Path) -> None:
        if first == self._writing:
            self._close_writer()
        with suppress(OSError):
            first.unlink()
        self.size_bytes -= self._sizes.pop(first)
        self.is_refused = False
        self._read_at = 0
        self._peeked = (0, 0)

    def _close_writer(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
        self._writer = self._writing = None


def _segments(slot: Path) -> list[Path]:
    return sorted(p for p in slot.glob(f"*{_SUFFIX}") if p.stem.isdigit())


def _try_lock(slot: Path) -> int | None:
    fd = os.open(slot / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _claim_slot(root: Path) -> tuple[Path, int]:
    for number in range(_SLOTS_MAX):
        slot = root / str(number)
        slot.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _try_lock(slot)
        if lock is not None:
            return slot, lock
    raise RuntimeError(f"all {_SLOTS_MAX} spool slots under {root} are taken; give another folder")


def _adopt(root: Path, slot: Path) -> None:
    """Move the segments of slots without an owner, for example of removed workers, into `slot`."""
    for other in sorted(root.iterdir()):
        if other == slot or not other.name.isdigit():
            continue
        lock = _try_lock(other)
        if lock is None:
            continue
        try:
            for segment in _segments(other):
                target = slot / segment.name
                while target.exists():
                    target = slot / f"{int(target.stem) + 1:020d}{_SUFFIX}"
                segment.rename(target)
        finally:
            os.close(lock)
