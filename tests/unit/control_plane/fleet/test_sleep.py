"""Which replicas of a pool sleep: nobody falls asleep who is needed, and nobody wakes for nothing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import Pool, Replica, ReplicaState, assign_roles, assign_sleep

READY, STARTING, SLEEPING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.SLEEPING


def _pool(awake: int, sleepers: int) -> Pool:
    return Pool("p", "sim", awake + sleepers, sleepers=sleepers)


def _replicas(*kinds: tuple[ReplicaState, bool]) -> list[Replica]:
    return [
        Replica(f"r{number}", "p", "c", "n", state=state, sleeps=sleeps)
        for number, (state, sleeps) in enumerate(kinds)
    ]


def _applied(replicas: Sequence[Replica], changed: dict[str, bool]) -> list[Replica]:
    return [replace(it, sleeps=changed.get(it.id, it.sleeps)) for it in replicas]


def test_the_newest_that_is_not_needed_sleeps() -> None:
    replicas = _replicas((READY, False), (READY, False), (READY, False))
    assert assign_sleep([_pool(2, 1)], replicas) == {"r2": True}


def test_one_that_serves_stays_awake_until_another_one_is_ready() -> None:
    replicas = _replicas((READY, False), (READY, False), (STARTING, False))
    assert assign_sleep([_pool(2, 1)], replicas) == {"r2": True}
    starting = _replicas((READY, False), (STARTING, False), (STARTING, False))
    assert assign_sleep([_pool(1, 1)], starting[:2]) == {"r1": True}


def test_sleepers_wake_when_more_are_needed_and_when_another_one_has_gone() -> None:
    replicas = _replicas((READY, False), (SLEEPING, True), (SLEEPING, True))
    assert assign_sleep([_pool(3, 0)], replicas) == {"r1": False, "r2": False}
    assert assign_sleep([_pool(1, 2)], replicas) == {}
    lost = [replace(replicas[0], state=ReplicaState.LOST), *replicas[1:]]
    assert assign_sleep([_pool(1, 2)], lost) == {"r1": False}


kinds = st.sampled_from([(READY, False), (STARTING, False), (SLEEPING, True), (READY, True)])


@given(st.lists(kinds, max_size=8), st.integers(0, 5), st.integers(0, 4))
def test_the_decision_is_stable_and_puts_no_needed_replica_to_sleep(
    found: list[tuple[ReplicaState, bool]], awake: int, sleepers: int
) -> None:
    pool, replicas = _pool(awake, sleepers), _replicas(*found)
    changed = assign_sleep([pool], replicas)
    after = _applied(replicas, changed)
    assert assign_sleep([pool], after) == {}
    serving = sum(it.state is READY and not it.sleeps for it in replicas)
    still = sum(it.state is READY and not it.sleeps for it in after)
    assert still >= min(serving, awake)
    assert sum(it.sleeps for it in after) <= max(sleepers, 0)


def _roles(*roles: str, state: ReplicaState = READY) -> list[Replica]:
    return [
        Replica(f"r{number}", "p", "c", "n", state=state, role=role)
        for number, role in enumerate(roles)
    ]


def test_a_replica_of_the_role_that_shrinks_falls_asleep_and_has_no_role() -> None:
    pool = replace(_pool(3, 1), prefill=1, decode=2)
    replicas = _roles("prefill", "prefill", "decode", "decode")
    assert assign_sleep([pool], replicas) == {"r1": True}, "r3 is newer, but decode keeps two"
    after = _applied(replicas, {"r1": True})
    assert assign_roles([pool], after) == {"r1": ""}


@pytest.mark.parametrize(("role", "prefill", "decode"), [("prefill", 2, 2), ("decode", 1, 3)])
def test_a_sleeper_wakes_into_the_role_that_needs_it(role: str, prefill: int, decode: int) -> None:
    pool = replace(_pool(4, 0), prefill=prefill, decode=decode)
    asleep = Replica("r3", "p", "c", "n", state=SLEEPING, sleeps=True)
    replicas = [*_roles("prefill", "decode", "decode"), asleep]
    assert assign_roles([pool], replicas) == {}, "a sleeper has no role"
    assert assign_sleep([pool], replicas) == {"r3": False}
    assert assign_roles([pool], _applied(replicas, {"r3": False})) == {"r3": role}


@given(st.lists(st.sampled_from(["", "prefill", "decode"]), max_size=8), st.data())
def test_sleepers_have_no_role_and_roles_change_no_sleep(
    roles: list[str], data: st.DataObject
) -> None:
    prefill, decode, sleepers = (data.draw(st.integers(0, 4)) for _ in range(3))
    pool = replace(_pool(prefill + decode, sleepers), prefill=prefill, decode=decode)
    replicas = _roles(*roles)
    replicas = _applied(replicas, assign_sleep([pool], replicas))
    changed = assign_roles([pool], replicas)
    after = [replace(it, role=changed.get(it.id, it.role)) for it in replicas]
    assert not any(it.role for it in after if it.sleeps)
    assert assign_sleep([pool], after) == {}, "roles wake nobody and put nobody to sleep"
