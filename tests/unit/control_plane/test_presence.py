"""Which routers are here, with connections that overlap."""

from contextlib import ExitStack

from control_plane.fleet.presence import Presence


def test_a_router_is_here_until_its_last_watch_ends() -> None:
    told: list[dict[str, str]] = []
    presence = Presence(lambda: told.append(presence.here()))
    first, second = ExitStack(), ExitStack()
    first.enter_context(presence.present("r", "a:1"))
    second.enter_context(presence.present("r", "b:2"))
    first.close()  # the old connection is found dead after the new one came
    assert presence.here() == {"r": "b:2"}
    assert presence.departed == set()
    second.close()
    assert (presence.here(), presence.departed) == ({}, {"r"})
    with presence.present("r", "a:1"):
        assert presence.departed == set()
    assert told[0] == {"r": "a:1"}
    assert len(told) == 6
