"""Tests that after any crash, a journal lists no chunk that was not recorded."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from replica.agent.artifacts.journal import Journal

DIGEST = "ab" * 32
COUNT = 40
NOTED = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=4), max_size=8)


def mask(chunks) -> int:
    found = 0
    for chunk in chunks:
        found |= 1 << chunk
    return found


def written(path: Path, batches) -> bytes:
    journal = Journal.open(path, DIGEST, COUNT)
    for batch in batches:
        journal.add(batch)
    journal.close()
    return path.read_bytes()


def reopened(path: Path, digest: str = DIGEST, count: int = COUNT) -> int:
    journal = Journal.open(path, digest, count)
    journal.close()
    return journal.held


@given(NOTED, st.data())
def test_a_journal_cut_anywhere_names_the_entries_before_the_cut(batches, data) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        content = written(path, batches)
        assert reopened(path) == mask(chunk for batch in batches for chunk in batch)
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        noted = [chunk for batch in batches for chunk in batch]
        assert reopened(path) == mask(noted[: max(0, cut - 32) // 8])
        journal = Journal.open(path, DIGEST, COUNT)  # the journal continues after the valid records
        before = journal.held
        journal.add([COUNT - 1])
        journal.close()
        assert reopened(path) == before | mask([COUNT - 1])


@given(NOTED.filter(bool), st.data())
def test_a_changed_byte_costs_chunks_and_invents_none(batches, data) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        content = bytearray(written(path, batches))
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        noted = [chunk for batch in batches for chunk in batch]
        assert reopened(path) == mask(noted[: max(0, at - 32) // 8])


def test_a_journal_of_another_artifact_is_begun_anew(tmp_path) -> None:
    written(tmp_path / "journal", [[1, 2]])
    assert reopened(tmp_path / "journal", "cd" * 32) == 0
    assert reopened(tmp_path / "journal") == 0


def test_chunks_that_an_artifact_does_not_have_are_not_believed(tmp_path) -> None:
    written(tmp_path / "journal", [[1, 30]])
    assert reopened(tmp_path / "journal", count=10) == mask([1])


def test_garbage_is_an_empty_journal(tmp_path) -> None:
    (tmp_path / "journal").write_bytes(os.urandom(500))
    assert reopened(tmp_path / "journal") == 0
