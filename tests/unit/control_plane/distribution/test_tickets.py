"""Keys change every hour, and no ticket is refused because of that."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.distribution.tickets import Tickets
from sluice.tickets import LIFETIME_S, is_valid

DIGEST = "ab" * 32
HOUR_S = 3600
SECRET = bytes(range(32))
moments = st.floats(1e9, 2e9)


@given(moments, st.floats(-HOUR_S / 2, LIFETIME_S), st.floats(0, LIFETIME_S))
def test_a_ticket_counts_with_any_keys_of_its_time(now_s, learned_s, used_s) -> None:
    """The source learned its keys up to half an hour before, or at any time since."""
    control, other_control = Tickets(SECRET), Tickets(SECRET)
    ticket = control.write(DIGEST, "source", "node", now_s)
    keys = other_control.keys("source", now_s + min(learned_s, used_s))
    assert len(keys) == 2
    assert is_valid(ticket, keys, DIGEST, now_s + used_s)
    assert not is_valid(ticket, keys, DIGEST, now_s + LIFETIME_S + 61)
    assert not is_valid(ticket, control.keys("node", now_s), DIGEST, now_s), "another's keys"
    assert not is_valid(ticket, Tickets(bytes(32)).keys("source", now_s), DIGEST, now_s)


@given(moments)
def test_old_keys_open_nothing_new(now_s: float) -> None:
    control = Tickets(SECRET)
    old = control.keys("source", now_s)
    ticket = control.write(DIGEST, "source", "node", now_s + 2 * HOUR_S)
    assert not is_valid(ticket, old, DIGEST, now_s)


def test_little_is_remembered() -> None:
    control = Tickets(SECRET)
    for hour in range(50):
        for node in ("a", "b"):
            control.keys(node, hour * HOUR_S)
            control.write(DIGEST, node, "c", hour * HOUR_S)
    assert len(control._keys) == 4
    assert len(control._written) == 2
