"""Tests the division of paid hours, the messages of the price list, and the break-even."""

from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.__main__ import main
from telemetry.costs.breakeven import at_volume, break_even
from telemetry.costs.model import HOUR_MS, Busy, Recorded, Work, costs, least_s, split, spread_idle
from telemetry.costs.prices import Prices, PricesError, parse_prices

EXAMPLE = Path(__file__).parents[3] / "deploy" / "cost" / "prices.example.toml"
SPAN = (HOUR_MS, 4 * HOUR_MS)


def price_list(price: str = "2.00", replicas: int = 1) -> Prices:
    pool = {
        "accelerator": "a",
        "replicas": replicas,
        "accelerators_per_replica": 2,
        "parameters": 1e9,
        "bytes_per_parameter": 2,
        "kv_bytes_per_token": 1000,
    }
    kind = {"price_per_hour": price, "memory_bandwidth_gb_s": 1000, "tflops": 100}
    return Prices.model_validate(
        {"currency": "USD", "accelerators": {"a": kind}, "pools": {"p": pool, "q": pool}}
    )


def work(start_ms: int = HOUR_MS, pool: str = "p", tenant: str = "t", **counts: float) -> Work:
    names = ("requests", "uncached_tokens", "cached_tokens", "output_tokens", "attended_tokens")
    return Work(start_ms, pool, tenant, "m", False, *(counts.get(name, 0.0) for name in names))


WEIGHTS = st.lists(st.floats(0, 1e12), min_size=1).filter(lambda found: sum(found) > 0)
COUNT = st.floats(0, 1e9)


@given(st.integers(0, 10**14), WEIGHTS)
def test_parts_add_up_and_are_right_to_one(total: int, weights: list[float]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    assert all(part >= 0 for part in parts)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * (weight / sum(weights))) <= 1 + total * 1e-12


@given(
    st.lists(
        st.builds(
            work,
            start_ms=st.sampled_from(range(*SPAN, HOUR_MS)),
            pool=st.sampled_from("pqr"),
            tenant=st.sampled_from("tuv"),
            requests=COUNT,
            uncached_tokens=COUNT,
            cached_tokens=COUNT,
            output_tokens=COUNT,
            attended_tokens=COUNT,
        ),
        max_size=20,
    ),
    st.lists(
        st.builds(
            Busy,
            st.sampled_from(range(*SPAN, HOUR_MS)),
            st.sampled_from("pqr"),
            st.floats(0, 1e4),
            st.floats(0, 1e6),
        ),
        max_size=9,
    ),
    st.decimals("0.000001", 1000, places=6),
    st.integers(0, HOUR_MS - 1),
)
def test_the_divided_cost_equals_the_paid_one(
    works: list[Work], busy: list[Busy], price: Decimal, cut_ms: int
) -> None:
    prices = price_list(str(price), replicas=3)
    span = (SPAN[0] + cut_ms, SPAN[1])
    found = costs(prices, busy, works, span)
    paid = round(float(price) * 1e6 * 3 * 2 * (span[1] - span[0]) / HOUR_MS)
    for pool in found.pools:
        assert abs(pool.micros - paid) <= 1
        lines = [line for line in found.lines if line.work.pool_id == pool.pool_id]
        assert sum(line.micros for line in lines) == pool.micros
        assert sum(line.micros for line in lines if line.is_idle) == pool.idle_micros
    total = sum(pool.micros for pool in found.pools)
    assert sum(line.micros for line in spread_idle(found.lines)) == total
    assert all(line.busy_micros >= 0 and line.idle_micros >= 0 for line in found.lines)
    unpriced = sum(it.requests for it in works if it.pool_id == "r")
    assert sum(found.unpriced_requests.values()) == pytest.approx(unpriced)


def test_idle_time_belongs_to_no_tenant_unless_it_is_spread():
    works = [work(tenant="t", output_tokens=300.0), work(tenant="u", output_tokens=100.0)]
    busy = [Busy(HOUR_MS, "p", busy_s=900.0, request_s=1800.0)]
    found = costs(price_list(), busy, works, SPAN)
    lines = [line for line in found.lines if line.work.pool_id == "p"]
    # 2 accelerators at 2.00 for 3 hours. A quarter of the first hour was busy.
    assert [line.micros for line in lines if not line.is_idle] == [750_000, 250_000]
    assert sum(line.micros for line in lines if line.is_idle) == 11_000_000
    spread = {line.work.tenant_id: line.micros for line in spread_idle(lines)}
    assert spread == {"t": 9_000_000, "u": 3_000_000}
    # No request used the other pool, so its cost stays idle.
    others = [line for line in found.lines if line.work.pool_id == "q"]
    assert all(line.is_idle for line in spread_idle(others))
    pool = found.pools[0]
    assert (pool.paid_hours, pool.busy_hours, pool.batch) == (6.0, 0.5, 2.0)


def test_given_hours_take_the_place_of_the_list():
    found = costs(price_list(), [], [], SPAN, {"p": 12.0})
    assert [pool.micros for pool in found.pools] == [24_000_000, 12_000_000]


def test_pools_without_a_replica_count_pay_recorded_hours_and_others_the_listed_ones() -> None:
    whole = price_list()
    alone = whole.pools["p"].model_copy(update={"replicas": None})
    prices = whole.model_copy(update={"pools": whole.pools | {"p": alone}})
    assert prices.recorded_pools == ["p"]
    recorded = [
        Recorded(HOUR_MS, "p", accelerator_hours=3.0, unassigned_hours=0.25),
        Recorded(3 * HOUR_MS, "p", accelerator_hours=0.0, unassigned_hours=1.0),
        Recorded(HOUR_MS, "q", accelerator_hours=99.0, unassigned_hours=0.0),
        Recorded(9 * HOUR_MS, "p", accelerator_hours=99.0, unassigned_hours=0.0),
    ]
    found = costs(prices, [], [], SPAN, None, recorded)
    assert [(it.paid_hours, it.paid_by) for it in found.pools] == [(5.5, "recorded"), (6.0, "list")]
    assert [it.micros for it in found.lines[:3]] == [7_000_000, 0, 4_000_000]
    assert costs(prices, [], [], SPAN, {"p": 1.5}, recorded).pools[0].paid_by == "given"


def test_replicas_may_change_over_time():
    text = EXAMPLE.read_text().replace(
        "replicas = 4  ",
        """replicas = [{since = 1970-01-01T01:30:00Z, replicas = 2},
            {since = 1970-01-01T02:15:00Z, replicas = 0},
            {since = 1970-01-01T03:00:00Z, replicas = 3},
            {since = 1970-01-01T09:00:00Z, replicas = 9}]""",
    )
    prices = parse_prices(text)
    found = costs(prices, [], [], SPAN)  # the time range is from 1:00 to 4:00
    assert [line.micros for line in found.lines] == [7_000_000, 3_500_000, 21_000_000]
    assert found.pools[0].paid_hours == 2 * (2 * 0.75 + 3)
    early = costs(prices, [], [], (0, HOUR_MS))
    assert [pool.micros for pool in early.pools] == [0]
    wrong = text.replace("T02:15:00Z", "T00:15:00Z")
    with pytest.raises(PricesError, match=r"pools\.llama-70b\.replicas: .* sort the steps"):
        parse_prices(wrong)


def test_more_busy_than_paid_is_divided_and_seen():
    works = [work(output_tokens=1.0)]
    found = costs(price_list(), [Busy(HOUR_MS, "p", 9000.0, 9000.0)], works, (HOUR_MS, 2 * HOUR_MS))
    pool = found.pools[0]
    assert (pool.paid_hours, pool.busy_hours, pool.unpaid_hours) == (2.0, 5.0, 3.0)
    assert (pool.micros, pool.idle_micros) == (4_000_000, 0)


def test_the_least_time_of_work():
    prices = price_list()
    pool, kind = prices.pools["p"], prices.accelerators["a"]
    # 2 * 1e9 * 1e5 / 200e12 seconds, divided by two accelerators
    assert least_s(work(uncached_tokens=1e5), pool, kind, 1.0) == pytest.approx(1.0)
    # 2 GB of weights for each step, which four requests share
    assert least_s(work(output_tokens=4000.0), pool, kind, 4.0) == pytest.approx(1.0)
    assert least_s(work(attended_tokens=2e9), pool, kind, 4.0) == pytest.approx(1.0)
    cached = least_s(work(cached_tokens=1e5), pool, kind, 1.0)
    assert cached == pytest.approx(5e-5)


def test_the_example_is_a_price_list():
    prices = parse_prices(EXAMPLE.read_text())
    assert prices.pools["llama-70b"].parameters == 70.6e9
    assert parse_prices(prices.model_dump_json(), is_json=True) == prices


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("price_per_hour = 3.50", "price_per_hour = -1", "accelerators.h200.price_per_hour: "),
        ("tflops = 989", "", "accelerators.h200.tflops: Field required (add it)"),
        ("replicas = 4", "replica = 4", "pools.llama-70b.replica: "),
        ('accelerator = "h200"', 'accelerator = "h20"', "pools.llama-70b.accelerator: 'h20' is"),
        ('currency = "USD"', 'currency = "$"', "currency: "),
        ('currency = "USD"', "currency", "is no TOML: "),
    ],
)
def test_mistakes_are_named(old: str, new: str, line: str) -> None:
    with pytest.raises(PricesError) as caught:
        parse_prices(EXAMPLE.read_text().replace(old, new, 1))
    assert any(it.startswith(line) for it in str(caught.value).splitlines()), caught.value


@given(st.floats(1e3, 1e9), st.floats(0.01, 1), st.floats(0.1, 100), st.floats(0.01, 100))
def test_break_even_is_where_the_bills_meet(
    tokens: float, utilisation: float, hour: float, api: float
) -> None:
    even = break_even(tokens, utilisation, hour, api)
    if even.first_tokens is None:
        for share in (0.1, 1.0, 7.5):
            assert not at_volume(even, even.replica_tokens * share * 0.999).own < 0.999 * (
                at_volume(even, even.replica_tokens * share).api
            )
        return
    assert even.always_tokens is not None
    assert even.first_tokens <= even.replica_tokens * (1 + 1e-9)
    assert at_volume(even, even.first_tokens * 1.001).api > 0
    below, above = at_volume(even, even.first_tokens * 0.99), even.first_tokens * 1.000001
    assert not below.is_own_cheaper
    assert at_volume(even, min(above, even.replica_tokens)).own <= even.own_per_million * (
        even.replica_tokens / 1e6
    ) * (1 + 1e-9)
    for step in (1.001, 1.5, 2.0, 3.7, 10.0):
        later = at_volume(even, even.always_tokens * step)
        assert later.own <= later.api * (1 + 1e-6)


def test_a_gap_opens_with_each_replica_until_there_is_none():
    # A replica costs 730 a month for 1000 M tokens. The API costs 1.00 per 1M. So q is 730 M.
    even = break_even(1e9 / 730, 1.0, 1.0, 1.0)
    assert even.first_tokens == pytest.approx(730e6)
    assert even.always_tokens == pytest.approx(3 * 730e6)
    cheaper = [at_volume(even, million * 1e6).is_own_cheaper for million in range(10, 6000, 20)]
    changes = [now for before, now in pairwise(cheaper) if before != now]
    assert changes == [True, False, True, False, True]


def test_the_service_does_not_start_with_a_wrong_price_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(EXAMPLE.read_text().replace("tflops = 989", "tflops = 0"))
    settings = {
        "CLICKHOUSE_URL": "http://127.0.0.1:1",
        "KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "HTTP_ADDRESS": "127.0.0.1:1",
        "ADMIN_KEY_SHA256": "0" * 64,
        "PRICES_FILE": str(path),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"TELEMETRY__{name}", value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"TELEMETRY__PRICES_FILE {path}: accelerators.h200.tflops: " in told
    path.write_text(EXAMPLE.read_text().replace("replicas = 4 ", "# "))
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert f"TELEMETRY__PRICES_FILE {path}: pools.llama-70b: add replicas, or set" in told
