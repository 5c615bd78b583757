"""Homes of sessions: remembered for a while, bounded, gone with their replica."""

from router.core.fleet import sessions as module
from router.core.fleet.sessions import FORGOTTEN_AFTER_S, Sessions


def test_a_session_has_the_home_where_it_was_served_last() -> None:
    sessions = Sessions()
    sessions.seen(7, "a", 0.0)
    assert sessions.home(7, 1.0) == "a"
    sessions.seen(7, "b", 2.0)
    assert sessions.home(7, 3.0) == "b"
    assert sessions.home(8, 3.0) is None


def test_no_session_has_no_home() -> None:
    sessions = Sessions()
    sessions.seen(0, "a", 0.0)
    assert (sessions.home(0, 0.0), len(sessions)) == (None, 0)


def test_a_session_is_forgotten_after_its_last_use() -> None:
    sessions = Sessions()
    sessions.seen(7, "a", 0.0)
    sessions.seen(7, "a", 200.0)
    assert sessions.home(7, 200.0 + FORGOTTEN_AFTER_S - 0.1) == "a"
    assert sessions.home(7, 200.0 + FORGOTTEN_AFTER_S) is None


def test_expired_sessions_leave_while_others_come() -> None:
    sessions = Sessions()
    for session in range(1, 101):
        sessions.seen(session, "a", 0.0)
    for session in range(1001, 1101):
        sessions.seen(session, "a", FORGOTTEN_AFTER_S)
    assert len(sessions) == 100


def test_the_number_of_sessions_is_bounded_and_the_oldest_leave(monkeypatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_MAX", 3)
    sessions = Sessions()
    for session in (1, 2, 3):
        sessions.seen(session, "a", 0.0)
    sessions.seen(1, "a", 1.0)
    sessions.seen(4, "a", 2.0)
    homes = [sessions.home(session, 2.0) for session in (1, 2, 3, 4)]
    assert homes == ["a", None, "a", "a"]


def test_the_sessions_of_a_lost_replica_have_no_home() -> None:
    sessions = Sessions()
    sessions.seen(1, "a", 0.0)
    sessions.seen(2, "b", 0.0)
    sessions.forget_replica("a")
    assert (sessions.home(1, 0.0), sessions.home(2, 0.0)) == (None, "b")
