"""Who fails is not asked for a while; who blames everybody is not believed."""

from control_plane.distribution.model import PlannerLimits, Trouble
from control_plane.distribution.trust import StoreGate, Trust

LIMITS = PlannerLimits(
    shun_s=5, shun_max_s=15, corrupt_shun_s=600, accused_max=3, store_readers_max=4
)


def test_a_corrupt_chunk_has_its_source_shunned_for_long():
    trust = Trust(LIMITS)
    assert trust.accuse(1, 2, Trouble.CORRUPT, 0.0) == [2]
    assert trust.accuse(3, 2, Trouble.CORRUPT, 1.0) == []
    assert trust.returned(599.0) == []
    assert trust.is_shunned(2)
    assert trust.returned(601.0) == [2]
    assert not trust.is_shunned(2)


def test_failures_that_repeat_are_shunned_longer_up_to_a_limit():
    trust, now_s = Trust(LIMITS), 0.0
    for shun_s in (5.0, 10.0, 15.0, 15.0):
        assert trust.accuse(1, 2, Trouble.TIMEOUT, now_s) == [2]
        assert trust.returned(now_s + shun_s - 0.1) == []
        now_s += shun_s
        assert trust.returned(now_s) == [2]
    now_s += LIMITS.shun_max_s + 1.0
    assert trust.accuse(1, 2, Trouble.REFUSED, now_s) == [2]
    assert trust.returned(now_s + 5.0) == [2], "long ago is forgiven"


def test_an_outage_that_many_tell_of_is_one():
    trust = Trust(LIMITS)
    assert [trust.accuse(i, 9, Trouble.TIMEOUT, 0.0) for i in range(4)] == [[9], [], [], []]
    assert trust.returned(5.0) == [9]


def test_a_node_that_finds_corruption_everywhere_is_itself_corrupt():
    trust = Trust(LIMITS)
    assert trust.accuse(1, 2, Trouble.CORRUPT, 0.0) == [2]
    assert trust.accuse(1, 3, Trouble.CORRUPT, 0.0) == [3]
    assert trust.accuse(1, 4, Trouble.CORRUPT, 0.0) == [1]
    assert trust.is_suspect(1, 599.0)
    assert not trust.is_shunned(4)
    assert trust.accuse(1, 5, Trouble.CORRUPT, 1.0) == []


def test_a_node_that_reaches_no_peer_is_no_longer_believed_but_goes_on_serving():
    trust = Trust(LIMITS)
    for source in (2, 3):
        assert trust.accuse(1, source, Trouble.TIMEOUT, 0.0) == [source]
    assert trust.accuse(1, 4, Trouble.TIMEOUT, 0.0) == []
    assert trust.is_suspect(1, 4.0)
    assert not trust.is_suspect(1, 5.0)
    assert not trust.is_shunned(1)


def test_the_store_has_so_many_readers_and_bytes():
    gate = StoreGate(LIMITS)
    for node in range(4):
        assert gate.admits(node, 0.0)
        gate.begin(node, 10)
    assert gate.admits(0, 0.0)
    assert not gate.admits(4, 0.0)
    gate.end(0, 10)
    assert gate.admits(4, 0.0)
    gate.begin(1, round(LIMITS.store_bytes_s * LIMITS.horizon_s))
    assert not gate.admits(1, 0.0)


def test_a_store_that_fails_is_asked_by_fewer_and_later():
    gate = StoreGate(LIMITS)
    gate.failed(0.0)
    gate.failed(0.5)
    assert not gate.admits(1, 0.9)
    assert gate.admits(1, 1.0)
    gate.begin(1, 10)
    gate.begin(2, 10)
    assert not gate.admits(3, 1.0)
    gate.failed(1.0)
    assert not gate.admits(1, 2.9)
    assert gate.admits(1, 3.0)
    gate.succeeded()
    gate.succeeded()
    assert gate.admits(3, 3.0)
