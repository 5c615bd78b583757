"""Tests that a new agent reads the keys for tickets, and that only their owner can."""

import stat

from replica.agent.artifacts.peer_keys import PeerKeys

KEYS = {7: b"a" * 32, 8: b"b" * 32}


def test_the_last_keys_are_kept_for_their_owner(tmp_path) -> None:
    path = tmp_path / "peer_keys.json"
    keys = PeerKeys(path)
    assert keys.known == {}
    path.with_suffix(".new").write_text("of an agent that was killed")
    keys.take(KEYS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PeerKeys(path).known == KEYS
    keys.take({8: KEYS[8], 9: b"c" * 32})
    keys.take({})
    assert keys.known.keys() == PeerKeys(path).known.keys() == {8, 9}


def test_a_damaged_file_counts_as_none(tmp_path) -> None:
    path = tmp_path / "peer_keys.json"
    for content in (b"", b"{", b"\xff", b"[1]", b'{"x": "00"}', b'{"1": "xyz"}', b'{"1": 2}'):
        path.write_bytes(content)
        assert PeerKeys(path).known == {}


def test_an_unwritable_place_is_no_error(tmp_path) -> None:
    keys = PeerKeys(tmp_path / "missing" / "peer_keys.json")
    keys.take(KEYS)
    assert keys.known == KEYS
