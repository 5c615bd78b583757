"""Of what lies on nodes only differences are written, in batches that are bounded."""

import pytest

from control_plane.database import DatabaseDownError
from control_plane.distribution import recorder
from control_plane.distribution.recorder import HoldingsBatch, HoldingsLedger, Recorder


def settled(**has: str) -> HoldingsLedger:
    """Return a ledger of nodes whose rows are as they should be."""
    ledger = HoldingsLedger()
    for node_id, digests in has.items():
        ledger.note(node_id, dict.fromkeys(digests, True), is_full=True)
        ledger.read(node_id, digests)
    assert ledger.batch(100) == HoldingsBatch()
    assert not ledger.is_due
    return ledger


def test_only_differences_are_written() -> None:
    ledger = settled(n="abc", m="a")
    ledger.note("n", {}, is_full=False)
    ledger.note("m", {"a": True}, is_full=False)
    assert not ledger.is_due
    ledger.note("n", {"d": True, "a": False}, is_full=False)
    batch = ledger.batch(100)
    assert batch == HoldingsBatch({"n": ["d"]}, {"n": ["a"]})
    ledger.written(batch)
    assert ledger.batch(100) == HoldingsBatch()
    assert not ledger.is_due


def test_the_rows_of_a_node_are_read_before_it_is_written() -> None:
    ledger = HoldingsLedger()
    ledger.note("n", {"a": True, "b": False}, is_full=True)
    assert ledger.unread() == "n"
    assert ledger.batch(100) == HoldingsBatch()
    ledger.read("n", ["b", "c"])
    assert ledger.unread() is None
    assert ledger.batch(100) == HoldingsBatch({"n": ["a"]}, {"n": ["b", "c"]})


def test_a_batch_is_bounded_and_its_rest_comes_next() -> None:
    ledger = settled(n="", m="")
    ledger.note("n", dict.fromkeys("abc", True), is_full=True)
    ledger.note("m", dict.fromkeys("xy", True), is_full=True)
    batches = []
    while (batch := ledger.batch(2)) != HoldingsBatch():
        batches.append(batch.added)
        ledger.written(batch)
    assert batches == [{"n": ["a", "b"]}, {"n": ["c"], "m": ["x"]}, {"m": ["y"]}]
    assert not ledger.is_due


def test_a_node_with_another_number_of_rows_is_read_again() -> None:
    ledger = settled(n="ab", m="a")
    ledger.compare({"n": 0, "m": 1, "unknown": 3})
    assert ledger.unread() == "n"
    ledger.forget("n")
    assert not ledger.is_due
    assert ledger.nodes() == ["m"]


class SlowDatabase:
    """Takes too long for more pairs than it can take."""

    def __init__(self, pairs_max: int) -> None:
        self.pairs_max = pairs_max
        self.taken: list[int] = []

    async def run(self, work):
        if "node_id" in work.keywords:
            return set()
        count = sum(len(digests) for digests in work.keywords["added"].values())
        if count > self.pairs_max:
            raise DatabaseDownError("no answer")
        self.taken.append(count)
        return None


async def test_a_batch_that_takes_too_long_is_halved_and_nothing_is_lost() -> None:
    database = SlowDatabase(pairs_max=recorder._PAIRS_MAX // 4)
    written = Recorder(database)
    written.note("n", {f"{number:05}": True for number in range(7_000)}, is_full=True)
    failures = 0
    while written._ledger.is_due:
        try:
            await written._write()
        except DatabaseDownError:
            failures += 1
    assert sum(database.taken) == 7_000
    assert failures >= 2


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_report_replaces_everything(is_full) -> None:
    ledger = settled(n="ab")
    ledger.note("n", {"c": True}, is_full=is_full)
    batch = ledger.batch(100)
    assert batch.added == {"n": ["c"]}
    assert batch.removed == ({"n": ["a", "b"]} if is_full else {})
