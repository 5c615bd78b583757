"""The list of names as deltas come."""

from gateway.names import Names
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


def test_a_name_that_was_a_model_and_an_alias_for_a_while_stays_listed() -> None:
    state = ControlState()
    names = Names(state)
    deltas = [
        wire.WatchResponse(upserts=wire.Objects(aliases=[wire.Alias(id="x", target="y")])),
        wire.WatchResponse(upserts=wire.Objects(models=[wire.Model(id="x", pool_id="p")])),
        wire.WatchResponse(removals=wire.Removals(aliases=["x"])),
    ]
    for version, delta in enumerate(deltas, 1):
        delta.version = version
        delta.is_snapshot = version == 1
        assert state.apply(delta)
        names.update(delta)
    assert [it.name for it in names.visible("a")] == ["x"]
    removal = wire.WatchResponse(version=4, removals=wire.Removals(models=["x"]))
    assert state.apply(removal)
    names.update(removal)
    assert not names.visible("a")
