"""Tests that the spool returns items in order, even if files are damaged or missing."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.spool import Spool, decode_records, encode_record

payloads = st.lists(st.binary(max_size=60), max_size=30)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def opened(root: Path, *, max_bytes: int = 1 << 20, segment_bytes: int = 200) -> Spool:
    return Spool(root, max_bytes=max_bytes, segment_bytes=segment_bytes)


def drain(spool: Spool, limit: int = 7) -> list[bytes]:
    found: list[bytes] = []
    while batch := spool.peek(limit):
        found += batch
        spool.advance()
    return found


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.spool"))


@given(payloads, st.data())
def test_a_torn_tail_costs_only_records_it_touches(items: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(encode_record(item) for item in items)
    cut = data.draw(st.integers(0, len(whole)))
    found = decode_records(whole[:cut])
    ends = [sum(8 + len(item) for item in items[: count + 1]) for count in range(len(items))]
    complete = sum(end <= cut for end in ends)
    assert found.payloads == items[:complete]
    assert found.damaged == (0 if cut in (0, *ends) else 1)
    assert found.end == cut


@given(payloads.filter(bool), st.data())
def test_a_flipped_bit_never_yields_a_wrong_record(items: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(encode_record(item) for item in items))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    remaining = iter(items)
    assert all(payload in remaining for payload in decode_records(bytes(whole)).payloads)


@settings(max_examples=40)
@given(st.lists(payloads, max_size=6), st.integers(1, 9))
def test_everything_comes_back_in_order_also_after_a_restart(
    batches: list[list[bytes]], limit: int
) -> None:
    with folder() as root:
        for batch in batches:  # a new owner per batch is like a crash after each write
            with closing(opened(root)) as spool:
                assert spool.append(batch) == len(batch)
        with closing(opened(root)) as spool:
            assert drain(spool, limit) == [item for batch in batches for item in batch]
            assert spool.is_empty
            assert (spool.dropped, spool.damaged) == (0, 0)
        assert not segments(root)


def test_reading_and_writing_may_alternate(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as spool:
        spool.append([b"1", b"2", b"3"])
        assert spool.peek(2) == [b"1", b"2"]
        spool.append([b"4"])
        spool.advance()
        assert drain(spool) == [b"3", b"4"]


def test_peeked_but_not_advanced_comes_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as spool:
        spool.append([b"1", b"2"])
        assert spool.peek(1) == [b"1"]
        assert spool.peek(5) == [b"1", b"2"]
    with closing(opened(tmp_path)) as spool:
        assert drain(spool) == [b"1", b"2"]


def test_over_the_bound_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    items = [f"{number:092}".encode() for number in range(50)]  # each item has 100 bytes on disk
    with closing(opened(tmp_path, max_bytes=1000, segment_bytes=200)) as spool:
        for item in items:
            spool.append([item])
            assert spool.size_bytes <= 1000
        kept = drain(spool)
        assert kept == items[-len(kept) :]
        assert 0 < len(kept) <= 10
        assert spool.dropped == len(items) - len(kept)


def test_a_bound_reached_while_replaying_does_not_confuse_the_reader(tmp_path: Path) -> None:
    items = [f"{number:092}".encode() for number in range(20)]
    with closing(opened(tmp_path, max_bytes=600, segment_bytes=200)) as spool:
        spool.append(items[:6])
        assert spool.peek(1) == items[:1]
        spool.append(items[6:])  # drops the segment that is being replayed
        spool.advance()
        kept = drain(spool)
        assert kept == items[-len(kept) :]


def test_cleared_events_are_counted_and_the_spool_goes_on(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as spool:
        assert spool.append([b"x" * 60] * 10) == 10
        spool.peek(4)
        spool.advance()
        spool.clear()
        assert (spool.is_empty, spool.size_bytes, segments(tmp_path)) == (True, 0, [])
        assert spool.dropped == 8  # two items of the dropped segment had been replayed
        spool.append([b"y"])
        assert drain(spool) == [b"y"]


def test_a_spool_is_tight_from_half_of_its_bound_on(tmp_path: Path) -> None:
    with closing(opened(tmp_path, max_bytes=1000)) as spool:
        spool.append([b"x" * 92] * 5)
        assert not spool.is_tight
        spool.append([b"x"])
        assert spool.is_tight
        drain(spool)
        assert not spool.is_tight


def test_a_torn_segment_does_not_poison_the_next_owner(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as spool:
        spool.append([b"first", b"torn"])
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-2])
    with closing(opened(tmp_path)) as spool:
        spool.append([b"second"])
        assert drain(spool) == [b"first", b"second"]
        assert spool.damaged == 1


def test_an_empty_or_foreign_file_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / f"{7:020d}.spool").touch()
    (tmp_path / "0" / "notes.spool").write_text("not ours")
    with closing(opened(tmp_path)) as spool:
        spool.append([b"x"])
        assert drain(spool) == [b"x"]


def test_owners_beside_each_other_take_different_slots(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as one, closing(opened(tmp_path)) as two:
        one.append([b"one"])
        two.append([b"two"])
        assert (drain(one), drain(two)) == ([b"one"], [b"two"])


def test_a_new_owner_adopts_the_segments_of_a_dead_neighbour(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as one:
        with closing(opened(tmp_path)) as two:
            two.append([b"left"])
        one.append([b"mine"])
    with closing(opened(tmp_path)) as heir:
        assert sorted(drain(heir)) == [b"left", b"mine"]
    assert not segments(tmp_path)


def test_a_disk_that_refuses_is_counted_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with closing(opened(tmp_path)) as spool:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", refuse)
            assert spool.append([b"a", b"b"]) == 0
            assert spool.append([b"c"]) == 0
        assert spool.dropped == 3
        assert spool.is_tight
        assert not segments(tmp_path), "a full disk is not filled with empty files"
        spool.append([b"c"])
        assert not spool.is_tight
        assert drain(spool) == [b"c"]


def full_disk(patch: pytest.MonkeyPatch, root: Path, room: int) -> None:
    """Limit the bytes that all spools under a folder have together."""
    write = os.write

    def written(fd: int, data: bytes) -> int:
        left = room - sum(path.stat().st_size for path in root.glob("*/*/*.spool"))
        if left <= 0:
            raise OSError(28, "No space left on device")
        return write(fd, data[:left])

    patch.setattr("os.write", written)


def test_on_a_full_disk_lesser_events_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, texts = tmp_path / "events", tmp_path / "texts"
    items = [f"{number:092}".encode() for number in range(8)]  # each item has 100 bytes on disk
    with closing(opened(texts)) as mine, closing(opened(texts)) as of_another_worker:
        assert mine.append([b"t" * 92] * 3) == 3
        assert of_another_worker.append([b"t" * 92] * 5) == 5
        with closing(Spool(usage, max_bytes=1 << 20, segment_bytes=1000, lesser=texts)) as spool:
            full_disk(monkeypatch, tmp_path, 850)
            assert spool.append(items) == 8  # the file system had room for half a record
            assert (spool.dropped, spool.evicted) == (0, 8)
            assert spool.is_tight
            assert drain(spool) == items
            assert not spool.is_tight
        # The spools' owners find no items, and continue.
        assert (mine.peek(9), of_another_worker.peek(9)) == ([], [])
        assert (mine.damaged, mine.dropped, mine.size_bytes) == (0, 0, 0)
        mine.append([b"new"])
        assert drain(mine) == [b"new"]


def test_events_written_after_an_eviction_are_found(tmp_path: Path) -> None:
    with closing(opened(tmp_path, segment_bytes=1000)) as texts:
        texts.append([b"t" * 92] * 3)
        for segment in segments(tmp_path):
            os.truncate(segment, 0)
        texts.append([b"later"])
        assert drain(texts) == [b"later"]
        assert texts.is_empty


def test_a_full_disk_without_lesser_events_costs_the_excess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, texts = tmp_path / "events", tmp_path / "texts"
    with closing(Spool(usage, max_bytes=1 << 20, segment_bytes=500, lesser=texts)) as spool:
        full_disk(monkeypatch, tmp_path, 250)
        assert spool.append([b"x" * 92] * 4) == 2
        assert (spool.dropped, spool.evicted, len(drain(spool))) == (2, 0, 2)


def test_a_refusal_is_forgotten_when_the_spool_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, tmp_path, 0)
    with closing(opened(tmp_path / "events")) as spool:
        assert spool.append([b"x"]) == 0
        assert spool.is_tight
        assert spool.peek(1) == []
        assert not spool.is_tight


def test_a_disk_that_takes_a_part_keeps_the_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with closing(opened(tmp_path)) as spool:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", lambda fd, data: write(fd, data[:12]))
            assert spool.append([b"a", b"b"]) == 1
        assert spool.dropped == 1
        spool.append([b"c"])
        assert drain(spool) == [b"a", b"c"]
