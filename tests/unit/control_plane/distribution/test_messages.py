"""What agents say is checked; two reports of a node are as good as one."""

from dataclasses import replace

import pytest

from control_plane.distribution.messages import (
    BadReportError,
    WantedWriter,
    merge,
    new_orders,
    read_report,
    write_answer,
)
from control_plane.distribution.model import (
    STORE,
    Failure,
    FetchPlan,
    NodePlace,
    NodeReport,
    Order,
    Priority,
    Trouble,
)
from control_plane.distribution.tickets import Tickets
from control_plane.distribution.wants import wants_of
from sluice.tickets import is_valid
from sluice.wire.distribution.v1 import distribution_pb2 as wire

A, B = "aa" * 32, "bb" * 32


def message(**changes) -> wire.DistributionReport:
    fields = {
        "node_id": "node-1",
        "boot_id": "boot-1",
        "region": "here",
        "rack": "one",
        "peer_address": "127.0.0.1:7000",
    }
    return wire.DistributionReport(**(fields | changes))


def test_a_report_has_the_form_of_the_planner() -> None:
    said = read_report(
        message(
            held=[wire.Held(digest=A, chunks=b"\x05\x01"), wire.Held(digest=B, is_complete=True)],
            failures=[
                wire.Failure(digest=A, chunk=3, trouble=wire.TROUBLE_CORRUPT),
                wire.Failure(digest=A, chunk=4, source_node_id="node-2", trouble=99),
            ],
            needed=[B],
            declined=[A],
            is_full=True,
        )
    )
    assert said.report == NodeReport(
        "node-1",
        NodePlace("here", "one"),
        "boot-1",
        {A: 0b1_0000_0101, B: 0},
        (
            Failure(A, 3, STORE, Trouble.CORRUPT),
            Failure(A, 4, "node-2", Trouble.REFUSED),
        ),
        is_full=True,
    )
    assert (said.complete, said.needed, said.declined) == ({A: False, B: True}, {B}, {A})


@pytest.mark.parametrize(
    "changes",
    [
        {"node_id": ""},
        {"node_id": STORE},
        {"node_id": "no spaces"},
        {"boot_id": ""},
        {"region": ""},
        {"rack": "r" * 129},
        {"peer_address": "http://somewhere/else"},
        {"held": [wire.Held(digest="../../etc")]},
        {"held": [wire.Held(digest=A, chunks=bytes(8193))]},
        {"failures": [wire.Failure(digest=A, chunk=1 << 16)]},
        {"failures": [wire.Failure(digest=A, source_node_id="\n")]},
        {"needed": ["x"]},
        {"declined": [A.upper()]},
        {"failures": [wire.Failure(digest=A)] * 4097},
        {"needed": [f"{i:064x}" for i in range(4097)]},
    ],
    ids=str,
)
def test_malformed_reports_are_refused(changes) -> None:
    with pytest.raises(BadReportError, match="of the report is malformed"):
        read_report(message(**changes))


def test_a_node_without_an_address_serves_no_peer() -> None:
    here = read_report(message()).report
    away = read_report(message(peer_address="")).report
    assert (here.serves, away.serves) == (True, False)
    assert not merge(here, replace(away, is_full=False)).serves


def test_two_reports_are_one() -> None:
    place = NodePlace("here", "one")
    first = NodeReport("n", place, "b", {A: 1, B: 1}, (Failure(A, 0, "x", Trouble.TIMEOUT),), True)
    second = NodeReport("n", place, "b", {A: 3}, (Failure(A, 1, "y", Trouble.TIMEOUT),))
    both = merge(first, second)
    assert both.held == {A: 3, B: 1}
    assert [failure.chunk for failure in both.failures] == [0, 1]
    assert both.is_full
    full = NodeReport("n", place, "b", {B: 7}, is_full=True)
    assert merge(first, full) == full
    restarted = NodeReport("n", place, "c", {A: 3})
    assert merge(first, restarted) == restarted


def test_an_answer_names_sources_that_are_there() -> None:
    orders = (
        Order(A, 0, 1, "node-2", Priority.NEEDED),
        Order(A, 1, 2, "node-gone", Priority.NEEDED),
        Order(B, 0, 9, STORE, Priority.PREFETCH),
    )
    tickets = Tickets(bytes(32))
    answer = write_answer(FetchPlan(orders), "node-1", {"node-2": "127.0.0.1:1"}, tickets, 1e9)
    assert [(o.source_node_id, o.source_address) for o in answer.orders] == [
        ("node-2", "127.0.0.1:1"),
        ("", ""),
    ]
    assert new_orders(orders[:1], orders) == (1, 1)
    theirs, ours = tickets.keys("node-2", 1e9), tickets.keys("node-1", 1e9)
    assert is_valid(answer.orders[0].ticket, theirs, A, 1e9)
    assert not answer.orders[1].ticket, "the store wants none"
    assert {key.id: key.key for key in answer.peer_keys} == ours


def test_an_answer_omits_unchanged_orders() -> None:
    writer = WantedWriter()
    shared = {B: Priority.PREFETCH, A: Priority.WARMING}

    def answer(wants, told, *, knows_unchanged=True) -> wire.DistributionAnswer:
        message = wire.DistributionAnswer(orders=[wire.Order(digest=A)])
        writer.add(message, wants, told, knows_unchanged=knows_unchanged)
        assert len(message.orders) == 1
        return message

    wants = wants_of(shared, (), ())
    first = answer(wants, None)
    assert [item.digest for item in first.wanted] == [A, B]
    assert not first.is_wanted_unchanged
    again = answer(wants, wants.shared)
    assert again.is_wanted_unchanged
    assert not again.wanted
    own = answer(wants_of(shared, {A}, {A, B}), shared)
    assert own.is_wanted_unchanged
    assert [(item.digest, item.priority) for item in own.own] == [
        (A, wire.PRIORITY_NEEDED),
        (B, wire.PRIORITY_UNSPECIFIED),
    ]
    changed = answer(wants_of({B: Priority.WARMING}, (), ()), shared)
    assert [item.digest for item in changed.wanted] == [B]
    older = answer(wants_of(shared, {A}, {B}), shared, knows_unchanged=False)
    assert [(item.digest, item.priority) for item in older.wanted] == [(A, wire.PRIORITY_NEEDED)]
    assert not older.own
