"""One count of a tenant's service over all cells of a pool: the merge, the lag, and the shares."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.queue.fair_queue import FairQueue
from router.core.queue.pool_service import SILENT_S, PoolService
from router.core.types.service import ServiceReport, TenantService
from tests.queue_server import Server, make


def report(number: int, *accounts: tuple, cell="c1", owner="r1", epoch=1) -> ServiceReport:
    told = tuple(TenantService(0, *account) for account in accounts)
    return ServiceReport(cell, owner, epoch, number, told)


def heard(pool: PoolService, told: ServiceReport, now: float = 0.0) -> dict[str, float]:
    return {change.tenant_id: change.service for change in pool.hear(told, now)}


# --- the merge ------------------------------------------------------------------------------


def test_service_before_the_first_report_is_not_counted():
    pool = PoolService()
    assert heard(pool, report(7, ("old", 3, 5000.0))) == {}
    assert heard(pool, report(8, ("old", 3, 5100.0), ("new", 8, 40.0))) == {
        "old": 100.0,
        "new": 40.0,
    }


def test_an_account_that_was_forgotten_and_opened_again_starts_from_nothing():
    pool = PoolService()
    heard(pool, report(1, ("t", 1, 900.0)))
    assert heard(pool, report(2, ("t", 2, 30.0))) == {"t": 30.0}
    assert heard(pool, report(3, ("t", 2, 20.0))) == {"t": -10.0}, "a charge was corrected"


def test_an_earlier_epoch_is_not_heard_and_a_later_one_is_a_new_beginning():
    pool = PoolService()
    heard(pool, report(1, ("t", 1, 100.0)))
    assert heard(pool, report(1, ("t", 1, 700.0), epoch=2)) == {}
    assert heard(pool, report(9, ("t", 1, 900.0), epoch=1)) == {}
    assert heard(pool, report(2, ("t", 1, 750.0), epoch=2)) == {"t": 50.0}


def test_after_a_silence_there_is_no_jump():
    pool = PoolService()
    heard(pool, report(1, ("t", 1, 100.0)), 0.0)
    later = SILENT_S + 0.1
    assert heard(pool, report(90, ("t", 1, 1e6), ("u", 50, 1e6)), later) == {}
    assert heard(pool, report(91, ("t", 1, 1e6 + 5)), later + 0.1) == {"t": 5.0}


def test_a_quiet_cell_that_reports_nothing_new_is_not_a_new_beginning():
    pool = PoolService()
    for number in range(10):
        heard(pool, report(number), number / 2)
    assert heard(pool, report(10, ("t", 10, 60.0)), 5.0) == {"t": 60.0}


@st.composite
def histories(draw):
    """Reports of one cell with one or more epochs, and the order in which they come."""
    told: list[ServiceReport] = []
    for epoch in range(1, draw(st.integers(1, 3)) + 1):
        services = {"a": 0.0, "b": 0.0, "c": 0.0}
        since = dict.fromkeys(services, 1)
        for number in range(1, draw(st.integers(1, 6)) + 1):
            changed = draw(st.sets(st.sampled_from("abc")))
            for name in sorted(changed):
                if draw(st.integers(0, 4)) == 0:
                    services[name], since[name] = 0.0, number
                services[name] += draw(st.integers(-5, 50))
            rows = [(name, since[name], services[name]) for name in sorted(changed)]
            told.append(report(number, *rows, epoch=epoch))
    arrivals = draw(st.lists(st.integers(0, len(told) - 1), max_size=30))
    return told, arrivals


@given(histories())
def test_duplicates_and_reordering_count_nothing_twice(history):
    """What was counted of an account is what the last report heard says, less the first one's."""
    told, arrivals = history
    pool = PoolService()
    counted: dict[tuple, float] = {}
    base: dict[tuple, float] = {}
    latest: dict[tuple, float] = {}
    at, first = (0, 0), 0
    for index in arrivals:
        one = told[index]
        is_news = (one.epoch, one.number) > at
        if is_news:
            first = one.number if one.epoch > at[0] else first
            at = (one.epoch, one.number)
            for account in one.accounts:
                key = (one.epoch, account.tenant_id, account.since)
                base.setdefault(key, 0.0 if account.since > first else account.service)
                latest[key] = account.service
        changes = heard(pool, one)
        assert is_news or not changes
        for tenant, service in changes.items():
            since = {account.tenant_id: account.since for account in one.accounts}
            key = (one.epoch, tenant, since[tenant])
            counted[key] = counted.get(key, 0.0) + service
    for key, service in latest.items():
        # An account that was replaced and heard of again later would be a new one.
        assert counted.get(key, 0.0) == pytest.approx(service - base[key])


@given(histories())
def test_a_lost_report_is_made_good_by_the_next_one_of_the_account(history):
    told, arrivals = history
    whole, lossy = PoolService(), PoolService()
    last = told[-1]
    kept = {index for index in arrivals if told[index].epoch == last.epoch}
    sums: list[dict[str, float]] = [{}, {}]
    ours = [one for one in told if one.epoch == last.epoch]
    for number, one in enumerate(ours):
        pools = [(whole, sums[0])]
        if number in (0, len(ours) - 1) or told.index(one) in kept:
            pools.append((lossy, sums[1]))
        for pool, total in pools:
            for tenant, service in heard(pool, one).items():
                total[tenant] = total.get(tenant, 0.0) + service
    for account in last.accounts:
        same = [a for one in ours for a in one.accounts if a.tenant_id == account.tenant_id]
        if all(before.since == after.since for before, after in pairwise(same)) and (
            account.since > ours[0].number
        ):
            assert sums[1].get(account.tenant_id, 0.0) == sums[0].get(account.tenant_id, 0.0)


def test_kept_reports_of_peers_are_bounded(monkeypatch):
    monkeypatch.setattr("router.core.queue.pool_service._ACCOUNTS_MAX", 100)
    monkeypatch.setattr("router.core.queue.pool_service._SOURCES_MAX", 4)
    pool = PoolService()
    for cell in range(20):
        pool.hear(report(1, *((f"t{n}", 1, 1.0) for n in range(90)), cell=f"c{cell}"), 0.0)
    assert len(pool._sources) == 4
    assert sum(len(source.accounts) for source in pool._sources.values()) <= 100 + 90


# --- reports --------------------------------------------------------------------------------


def serve(queue: FairQueue, tenant: str, prompt: int, order: int):
    queue.push(make(order, tenant, prompt), 0.0)
    head = queue.peek(0.0)
    assert head is not None
    return queue.take(head, 0.0)


def test_a_report_holds_the_largest_changes_and_the_rest_comes_later():
    queue = FairQueue()
    for order, prompt in enumerate((10, 500, 70), 1):
        serve(queue, f"t{order}", prompt, order)
    assert [account.tenant_id for account in queue.report(1, 0.0)] == ["t2"]
    assert [account.service for account in queue.report(9, 0.0)] == [10.0, 70.0]
    assert queue.report(9, 0.0) == []


def test_a_lift_is_no_service():
    queue = FairQueue()
    serve(queue, "busy", 1000, 1)
    queue.push(make(2, "busy", 50), 0.0)
    queue.push(make(3, "late", 20), 0.0)
    queue.take(next(one for one in queue.waiting() if one.order == 3), 0.0)
    told = {account.tenant_id: account.service for account in queue.report(9, 0.0)}
    assert told == {"busy": 1000.0, "late": 20.0}


def test_accounts_that_are_forgotten_are_told_of_no_more():
    queue = FairQueue()
    for order in range(1, 3000):
        serve(queue, f"t{order}", 10, order).running -= 1
    known = queue._tiers[0]._tenants
    assert {one.tenant_id for one in queue._tiers[0].ledger.recent()} <= known.keys()


# --- shares ---------------------------------------------------------------------------------


class Cells:
    """Cells of one pool that hear one another's reports so late."""

    def __init__(self, cells: int, age_s: float | None, *, room: int = 8) -> None:
        self.servers = [Server(room, seed=number) for number in range(cells)]
        self.age_s = age_s
        self.under_way: deque[tuple[float, int, ServiceReport]] = deque()
        self.tell_at = 0.0

    def keep_waiting(self, tenant: str, cells, **words) -> None:
        for number in cells:
            while self.servers[number].queue.tenant_load(0, tenant)[0] < 8:
                self.servers[number].push(tenant, 100, **words)

    def step(self, output: int = 50) -> None:
        for server in self.servers:
            server.step(output)
        now = self.servers[0].now
        if self.age_s is None:
            return
        if now >= self.tell_at:
            self.tell_at = now + self.age_s / 2
            for number, server in enumerate(self.servers):
                queue = server.queue
                told = ServiceReport(f"c{number}", "r", 1, queue.reports + 1, queue.report(64, now))
                self.under_way.append((now + self.age_s / 2, number, told))
        while self.under_way and self.under_way[0][0] <= now:
            _, teller, told = self.under_way.popleft()
            for number, server in enumerate(self.servers):
                if number != teller:
                    server.queue.hear(told, now)

    def take_service(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for server in self.servers:
            for (_, tenant), service in server.service.items():
                out[tenant] = out.get(tenant, 0.0) + service
            server.service.clear()
        return out


def wide_share(
    cells: int, age_s: float | None, *, room: int = 8, output: int = 50, steps: int = 3000
) -> float:
    """The share of a tenant in all cells beside one tenant of each cell, all with work at all times."""
    pool = Cells(cells, age_s, room=room)
    for step in range(steps):
        pool.keep_waiting("wide", range(cells))
        for number in range(cells):
            pool.keep_waiting(f"narrow-{number}", [number])
        pool.step(output)
        if step == steps // 3:
            pool.take_service()
    service = pool.take_service()
    return service["wide"] / sum(service.values())


@pytest.mark.parametrize("age_s", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("cells", [2, 4, 8])
def test_a_tenant_with_many_cells_gets_the_share_of_one(cells, age_s):
    if age_s == 0.1:
        assert wide_share(cells, None) == pytest.approx(0.5, abs=0.02), "each cell by itself"
    assert wide_share(cells, age_s) == pytest.approx(1 / (cells + 1), rel=0.05)


def test_many_cells_share_even_if_reports_are_seconds_old():
    assert wide_share(32, 3.0) == pytest.approx(1 / 33, rel=0.05)


def test_service_elsewhere_is_not_forgotten_where_requests_take_longer_than_the_lag():
    """Two places, and requests of 4 s: in `LAG_S` a tenant gets less than one turn."""
    share = wide_share(2, 0.1, room=2, output=200, steps=15_000)
    assert share == pytest.approx(1 / 3, rel=0.05)
