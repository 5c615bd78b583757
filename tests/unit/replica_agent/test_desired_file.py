"""Tests that a new agent reads the last desired state, and ignores a damaged file."""

from pathlib import Path

from replica.agent.control import DesiredFile
from sluice.wire.agent.v1 import agent_pb2 as agent


def wish(version: int, *names: str) -> agent.SyncResponse:
    return agent.SyncResponse(
        version=version,
        replicas=[
            agent.DesiredReplica(replica_id=name, engine="sim", engine_options={"speed": "2"})
            for name in names
        ],
    )


def test_a_saved_state_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    assert DesiredFile(path).load() is None
    DesiredFile(path).save(wish(3, "a", "b"))
    assert DesiredFile(path).load() == wish(3, "a", "b")


def test_only_other_replicas_are_written_again(tmp_path: Path) -> None:
    file = DesiredFile(tmp_path / "desired.json")
    file.save(wish(3, "a"))
    file.save(wish(4, "a"))
    assert file.load() == wish(3, "a")
    file.save(wish(5))
    assert file.load() == wish(5)


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    for content in (b"", b"{", b"\xff\xfe", b'{"version": "x"}'):
        path.write_bytes(content)
        assert DesiredFile(path).load() is None


def test_fields_of_a_newer_agent_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    path.write_text('{"version": "7", "colour": "blue", "replicas": [{"replica_id": "a"}]}')
    assert DesiredFile(path).load() == agent.SyncResponse(
        version=7, replicas=[agent.DesiredReplica(replica_id="a")]
    )


def test_an_unwritable_place_is_no_error(tmp_path: Path) -> None:
    DesiredFile(tmp_path / "missing" / "desired.json").save(wish(1, "a"))
