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
    assert presence.departed == {}
    second.close()
    assert (presence.here(), presence.departed, presence.gone) == ({}, {"r": "b:2"}, set())
    with presence.present("r", "a:1"):
        assert presence.departed == {}
    assert told[0] == {"r": "a:1"}
    assert len(told) == 6


def test_a_router_that_took_leave_is_gone_though_its_watch_is_open() -> None:
    presence = Presence(lambda: None)
    with presence.present("r", "a:1"):
        presence.leave("r")
        assert (presence.here(), presence.departed, presence.gone) == ({}, {"r": "a:1"}, {"r"})
        presence.written({"r"}, {"r"})
        assert (presence.here(), presence.departed, presence.gone) == ({}, {}, set())
    assert presence.departed == {}, "that was told already"
    with presence.present("r", "a:1"):
        assert presence.here() == {"r": "a:1"}


def test_a_new_watch_takes_a_goodbye_back() -> None:
    presence = Presence(lambda: None)
    with presence.present("r", "a:1"):
        presence.leave("r")
        with presence.present("r", "b:2"):
            assert (presence.here(), presence.departed, presence.gone) == ({"r": "b:2"}, {}, set())
        assert presence.here() == {"r": "a:1"}


def test_a_goodbye_of_a_router_that_is_nowhere_is_written_down() -> None:
    presence = Presence(lambda: None)
    presence.leave("r")
    assert (presence.departed, presence.gone) == ({"r": ""}, {"r"})


def test_a_silent_router_is_gone_until_it_answers_or_comes_again() -> None:
    told: list[dict[str, str]] = []
    presence = Presence(lambda: told.append(presence.here()))
    with presence.present("r", "a:1"):
        presence.answered("r")
        assert told == [{"r": "a:1"}], "nothing has changed"
        presence.silent("r")
        presence.silent("r")
        assert told[1:] == [{}], "it is told once"
        assert (presence.departed, presence.gone) == ({"r": "a:1"}, {"r"})
        assert presence.watched() == {"r": "a:1"}
        presence.written({"r"}, {"r"})
        presence.answered("r")
        assert presence.here() == {"r": "a:1"}
        presence.silent("r")
        with presence.present("r", "b:2"):
            assert (presence.here(), presence.departed, presence.gone) == ({"r": "b:2"}, {}, set())


def test_the_watch_of_a_silent_router_ends_without_a_word() -> None:
    presence = Presence(lambda: None)
    with presence.present("r", "a:1"):
        presence.silent("r")
        presence.written({"r"}, {"r"})
    assert (presence.departed, presence.watched()) == ({}, {}), "it was told already"
    presence.silent("r")
    assert presence.departed == {}, "who has no watch is not silent"
