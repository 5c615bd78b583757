"""`sluice top`: what two scrapes say together, whatever restarted or is missing between them."""

import json
from collections.abc import Mapping
from math import inf

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.app import app
from cli.top_scrape import Scrape, ScrapeChange, gathered, parse, quantile
from cli.top_sources import NAMES, Pages, Prometheus, ScrapeError, ScrapeTarget, parse_targets
from cli.top_view import build, lines
from tests.unit.observability.known import SCRAPED

VALUES = st.floats(0, 1e12)
SERIES = st.fixed_dictionaries(
    {
        "instance": st.sampled_from(["a:1", "b:2"]),
        "pool": st.sampled_from(["", "p", "a-pool-with-a-long-name"]),
        "tenant": st.sampled_from(["t", "other"]),
        "kind": st.sampled_from(["prompt", "output"]),
        "le": st.sampled_from(["0.1", "1.0", "+Inf"]),
        "state": st.sampled_from(["ready", "lost"]),
        "adapter": st.sampled_from(["0123456789ab", "other"]),
        "kv_cache_block_type": st.just("fraction"),
        "request_type": st.sampled_from(["scheduled", "waiting"]),
        "result": st.sampled_from(["hit", "miss"]),
    }
).map(lambda labels: frozenset(labels.items()))
SAMPLES = st.lists(st.tuples(st.sampled_from(NAMES), SERIES, VALUES), max_size=40)


def scrape(at_s: float, *samples: tuple[str, Mapping[str, str], float]) -> Scrape:
    rows = [(name, frozenset(labels.items()), value) for name, labels, value in samples]
    return gathered(at_s, rows)


def counter(at_s: float, **counts: float) -> Scrape:
    """A scrape of one counter, by instance."""
    return scrape(at_s, *(("n_total", {"instance": it}, n) for it, n in counts.items()))


def test_everything_that_is_read_is_in_the_golden_file():
    assert set(NAMES) <= set(SCRAPED)


def test_all_that_is_shown_is_read_and_nothing_else():
    asked: set[str] = set()

    class Asked(dict):
        def get(self, name, default=None):
            asked.add(name)
            return default

    build(ScrapeChange(Scrape(0.0, Asked()), Scrape(1.0, Asked())))
    assert asked == set(NAMES)


@given(st.floats(0, 100), SAMPLES, SAMPLES, st.integers(1, 250))
def test_a_view_with_missing_pages_fits(took_s, before, after, width):
    view = build(ScrapeChange(gathered(0.0, before), gathered(took_s, after, ["http://x: gone"])))
    json.dumps(view.as_json(), allow_nan=False)
    assert all(len(line) <= width for line in lines(view, width))
    shares = [*view.tenants, *view.models]
    rates = [it.output_tokens_per_s for it in shares] + [it.requests_per_s for it in shares]
    assert all(rate is None or rate >= 0 for rate in rates)


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=20))
def test_restarts_of_a_counter_never_make_more_than_there_was(steps):
    """Of what a process counted and then lost with its life, nobody can know."""
    value, total, told, last = 0, 0, 0.0, counter(0.0, a=0)
    for at_s, (grown, has_restarted) in enumerate(steps, 1):
        total += grown
        value = grown if has_restarted else value + grown
        now = counter(float(at_s), a=value)
        told += ScrapeChange(last, now).rates("n_total")[()]
        last = now
    assert 0 <= told <= total
    if not any(has_restarted for _, has_restarted in steps):
        assert told == total


def test_a_process_that_is_new_here_has_no_rate_and_a_series_that_is_new_has_one():
    change = ScrapeChange(counter(0.0, a=10.0), counter(2.0, a=14.0, b=1e9))
    assert change.rate("n_total") == 2.0
    lost = ScrapeChange(counter(0.0, a=10.0, b=7.0), counter(2.0, a=14.0))
    assert lost.rate("n_total") == 2.0
    first = scrape(0.0, ("other", {"instance": "a"}, 1.0))
    assert ScrapeChange(first, counter(2.0, a=4.0)).rate("n_total") == 2.0
    assert ScrapeChange(first, counter(0.0, a=4.0)).rate("n_total") is None
    assert ScrapeChange(first, first).rate("n_total") is None


@given(
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_quantiles_rise_and_stay_within_the_edges(sizes, shares):
    edges = [0.1, 0.5, 1.0, inf]
    counts = {edge: float(sum(sizes[: at + 1])) for at, edge in enumerate(edges)}
    low, high = (quantile(counts, share) for share in sorted(shares))
    if not sum(sizes):
        assert (low, high) == (None, None)
    else:
        assert low is not None
        assert high is not None
        assert 0 <= low <= high <= 1.0


@given(st.dictionaries(st.sampled_from([0.1, 0.5, 1.0, inf]), VALUES), st.floats(0, 1))
def test_a_torn_histogram_is_no_error(counts, share):
    found = quantile(counts, share)
    assert found is None or 0 <= found <= 1.0


def test_quantiles_are_linear_within_a_bucket():
    counts = {0.1: 0.0, 0.5: 10.0, 1.0: 10.0, inf: 10.0}
    assert quantile(counts, 0.5) == pytest.approx(0.3)
    assert quantile({inf: 3.0}, 0.5) is None
    assert quantile({1.0: 0.0, inf: 3.0}, 0.5) == 1.0


def test_pools_tenants_and_models_are_told_apart():
    def at(took_s: float, tokens: float) -> Scrape:
        engine = {"instance": "e:1", "pool": "p"}
        control = {"instance": "c:1", "pool": "p"}
        gateway = {"instance": "g:1", "kind": "output"}
        adapter = {**engine, "adapter": "0123456789ab", "kind": "output"}
        kv = {**engine, "kv_cache_block_type": "fraction"}
        return scrape(
            took_s,
            ("llm_output_tokens_total", engine, 10 * tokens),
            ("llm_adapter_tokens_total", adapter, 4 * tokens),
            ("nv_trt_llm_kv_cache_block_metrics", kv, 0.25),
            ("nv_trt_llm_kv_cache_block_metrics", {**kv, "instance": "e:2"}, 0.75),
            ("control_plane_replicas_count", {**control, "state": "ready"}, 2),
            # Another control plane says the same of the same replicas.
            ("control_plane_replicas_count", {**control, "instance": "d", "state": "ready"}, 2),
            ("control_plane_replicas_count", {**control, "state": "starting"}, 1),
            ("control_plane_replicas_count", {**control, "state": "lost"}, 5),
            ("llm_queue_depth", {"instance": "r", "pool": "p", "priority": "1"}, 3),
            ("llm_queue_depth", {"instance": "r", "pool": "p", "priority": "2"}, 4),
            ("gateway_tenant_tokens_total", {**gateway, "tenant": "t"}, 2 * tokens),
            ("gateway_tenant_tokens_total", {**gateway, "tenant": "u"}, 8 * tokens),
        )

    view = build(ScrapeChange(at(0.0, 0.0), at(2.0, 1.0)), {"0123456789ab": "pirate"})
    [pool] = view.pools
    assert (pool.ready, pool.replicas, pool.queued, pool.output_tokens_per_s) == (2, 3, 7, 5)
    assert (pool.kv_mean, pool.kv_max, pool.cached) == (0.5, 0.75, None)
    assert [(it.name, it.output_tokens_per_s) for it in view.tenants] == [("u", 4), ("t", 1)]
    models = [(it.name, it.output_tokens_per_s) for it in view.models]
    assert models == [("base of p", 3), ("pirate", 2)]


def test_a_page_keeps_the_labels_of_its_target():
    text = '# TYPE a gauge\na{pool="own"} 1\n# TYPE n counter\nn_total 2\nbad NaN\n'
    found = {name: (dict(labels), value) for name, labels, value in parse(text, {"pool": "p"})}
    assert found == {"a": ({"pool": "p"}, 1.0), "n_total": ({"pool": "p"}, 2.0)}
    with pytest.raises(ValueError, match=r".+"):
        list(parse("<html>no metrics</html>", {}))


def test_targets_are_urls_with_or_without_a_pool():
    words = ["http://a:1", "p=http://b:2/metrics", "https://c/x?y=z"]
    assert parse_targets(words) == [
        ScrapeTarget("http://a:1/metrics"),
        ScrapeTarget("http://b:2/metrics", (("pool", "p"),)),
        ScrapeTarget("https://c/x?y=z"),
    ]
    for word in ("", "p=", "localhost:9090", "ftp://x"):
        with pytest.raises(ValueError, match="neither"):
            parse_targets([word])
    for words in (("--metrics-url", "x"), ("--metrics-url", "http://x", "--prometheus", "y")):
        assert CliRunner().invoke(app, ["top", *words]).exit_code == 2


async def test_silent_pages_are_named_beside_the_others():
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if request.url.host == "good":
            page = f"# TYPE router_queue_requests gauge\nrouter_queue_requests {asked}\n"
            return httpx.Response(200, text=page + "unread 1\n")
        if request.url.host == "bad":
            return httpx.Response(500)
        raise httpx.ConnectError("refused")

    async def targets() -> list[ScrapeTarget]:
        return parse_targets(["http://good", "http://bad", "http://gone"])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        source = Pages(http, targets)
        assert (await source.change()).took_s == 0
        change = await source.change()
    assert set(change.after.values) == {"router_queue_requests"}
    assert change.before is not change.after
    assert change.after.silent == (
        "http://bad/metrics: HTTPStatusError",
        "http://gone/metrics: ConnectError",
    )

    async def nobody() -> list[ScrapeTarget]:
        return parse_targets(["http://gone"])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(ScrapeError, match="ConnectError"):
            await Pages(http, nobody).change()


async def test_a_prometheus_is_asked_for_both_ends_of_the_window():
    def answer(request: httpx.Request) -> httpx.Response:
        at_s = float(dict(httpx.QueryParams(request.content.decode()))["time"])
        metric = {"__name__": "router_tokens_total", "instance": "r:1"}
        results = [{"metric": metric, "value": [at_s, str(2 * at_s)]}]
        return httpx.Response(200, json={"status": "success", "data": {"result": results}})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        change = await Prometheus(http, "http://prom:9090/", 60.0).change()
    assert change.took_s == pytest.approx(60.0)
    assert build(change).fleet.output_tokens_per_s == pytest.approx(2.0, rel=1e-3)

    def other(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    async with httpx.AsyncClient(transport=httpx.MockTransport(other)) as http:
        with pytest.raises(ScrapeError, match="as Prometheus does"):
            await Prometheus(http, "http://prom:9090", 60.0).change()
