"""Small files of bases on disk: whole or not there, within a bound, whatever processes die."""

import errno
import os
from pathlib import Path

import pytest

from gateway.bases.shelf import BaseShelf

A, B, C = "a" * 64, "b" * 64, "c" * 64
FILES = {
    "tokenizer.json": b"{}" * 500,
    "additional_chat_templates/tool_use.jinja": b"",
    "config.json": b"{}",
}


def shelf(directory: Path, bytes_max: int = 1 << 20) -> BaseShelf:
    return BaseShelf(directory / "bases", bytes_max)


def put(found: BaseShelf, digest: str) -> None:
    with found.locked() as is_ours:
        assert is_ours
        found.put(digest, FILES)


def test_a_stored_base_is_found(tmp_path) -> None:
    one, other = shelf(tmp_path), shelf(tmp_path)
    put(one, A)
    assert {name: (other.find(A) / name).read_bytes() for name in FILES} == FILES
    with pytest.raises(FileNotFoundError):
        one.find(B)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no sums"])
def test_a_damaged_base_is_missing_and_can_be_stored_again(tmp_path, damage: str) -> None:
    found = shelf(tmp_path)
    put(found, A)
    file = found.find(A) / ("SHA256SUMS" if damage == "no sums" else "tokenizer.json")
    match damage:
        case "cut":
            file.write_bytes(FILES["tokenizer.json"][:-1])
        case "changed":
            file.write_bytes(b"[]" * 500)
        case _:
            file.unlink()
    with pytest.raises(FileNotFoundError):
        found.find(A)
    assert not found.has(A)
    put(found, A)
    assert found.find(A)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_base_that_is_unreadable_for_now_stays(tmp_path, monkeypatch, number: int) -> None:
    found = shelf(tmp_path)
    put(found, A)

    def fails(_: Path) -> bytes:
        raise OSError(number, "not now")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fails)
        with pytest.raises(OSError, match="not now"):
            found.find(A)
    assert found.find(A)


@pytest.mark.parametrize("sums", [b"", b"\xff", b"0  \0", b"0", b"0  config.json/x", b"x" * 999])
def test_sums_that_say_nothing_are_damage(tmp_path, sums: bytes) -> None:
    found = shelf(tmp_path)
    put(found, A)
    (found.find(A) / "SHA256SUMS").write_bytes(sums)
    with pytest.raises(FileNotFoundError):
        found.find(A)
    assert not found.has(A)


def test_the_least_recently_used_makes_room(tmp_path) -> None:
    found = shelf(tmp_path, bytes_max=2800)  # two of them
    put(found, A)
    put(found, B)
    for age_s, digest in ((100, A), (200, B)):
        os.utime(tmp_path / "bases" / digest, (1e9 - age_s, 1e9 - age_s))
    found.find(B)
    put(found, C)
    assert [found.has(it) for it in (A, B, C)] == [False, True, True]


def test_a_base_larger_than_the_shelf_is_refused(tmp_path) -> None:
    found = shelf(tmp_path, bytes_max=1000)
    with found.locked(), pytest.raises(OSError, match="too much"):
        found.put(A, FILES)
    assert not found.has(A)


def test_one_base_is_stored_at_a_time_and_leftovers_of_a_killed_gateway_go(tmp_path) -> None:
    one, other = shelf(tmp_path), shelf(tmp_path)
    with one.locked() as is_ours, other.locked() as is_others:
        assert (is_ours, is_others) == (True, False)
    for left in (".staging", ".gone_1"):
        (tmp_path / "bases" / left).mkdir()
        (tmp_path / "bases" / left / "tokenizer.json").write_bytes(b"{")
    put(other, A)
    assert sorted(path.name for path in (tmp_path / "bases").iterdir()) == [".lock", A]
