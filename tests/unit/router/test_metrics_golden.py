"""The router's metrics are an interface: names, types and labels change on purpose only."""

from pathlib import Path

from router.core.router import RouterCore
from router.core.types.actions import Stats
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Request
from router.metrics import RouterMetrics

GOLDEN = Path(__file__).with_name("metrics.golden")


def test_names_and_types_are_as_documented():
    metrics = RouterMetrics()
    metrics.take(Stats(outcomes={("stop", ""): 2}, ttft_s=[0.1], queue_times_s=[0.2], tokens=3))
    lines = metrics.exposition(RouterCore(CoreConfig())).decode().splitlines()
    types = sorted(line for line in lines if line.startswith("# TYPE") and "_created" not in line)
    assert types == GOLDEN.read_text().splitlines()
    assert 'router_outcomes_total{code="",kind="stop"} 2.0' in lines
    assert "router_tokens_total 3.0" in lines


def test_events_are_counted():
    metrics = RouterMetrics()
    stats = Stats(prompt_tokens=100, cached_tokens=60, preemptions=2, ejections={"slow": 1})
    stats.transfers["partial"] = 3
    metrics.take(stats)
    metrics.take(stats)
    lines = metrics.exposition(RouterCore(CoreConfig())).decode().splitlines()
    assert "router_prompt_tokens_total 200.0" in lines
    assert "router_cached_tokens_total 120.0" in lines
    assert "router_preemptions_total 4.0" in lines
    assert 'router_transfers_total{result="partial"} 6.0' in lines
    assert 'router_ejections_total{reason="slow"} 2.0' in lines


def test_replicas_are_counted_by_health():
    core, metrics = RouterCore(CoreConfig()), RouterMetrics()
    names = ["one", "two", "three", "four"]
    core.on_cells(["cell"], [ReplicaPlan(name, "cell") for name in names])
    for name in names[:3]:
        core.on_attached(name, 1, EngineLimits(1000, 4, 256, 100, 16), 0.0)
    for at in range(3):
        core.cells["cell"].fleet.health.failed("one", float(at))
    lines = metrics.exposition(core).decode().splitlines()
    assert 'router_replicas{health="healthy"} 2.0' in lines
    assert 'router_replicas{health="ejected"} 1.0' in lines
    assert 'router_replicas{health="half_open"} 0.0' in lines


def test_waiting_requests_are_told_by_pool_and_priority_of_the_tier():
    core, metrics = RouterCore(CoreConfig()), RouterMetrics()
    core.on_cells(["cell", "other"], [])
    for number, (cell, priority) in enumerate((("cell", 7), ("cell", 4), ("other", 3))):
        request = Request(handle=number, cell_id=cell, prompt_tokens=9, priority=priority)
        request.order = number
        core.cells[cell].queue.push(request, 0.0)
    metrics.follow(lambda: 2.5, lambda cell_id: {"cell": "big"}.get(cell_id, "small"))
    lines = metrics.exposition(core).decode().splitlines()
    assert 'llm_queue_depth{pool="big",priority="1"} 2.0' in lines
    assert 'llm_queue_depth{pool="small",priority="0"} 1.0' in lines
    assert "router_control_age_seconds 2.5" in lines
    core.cells["cell"].queue.drain()
    metrics.follow(lambda: 2.5, lambda _: "one")
    page = metrics.exposition(core).decode()
    assert 'llm_queue_depth{pool="one",priority="1"} 0.0' in page
    assert 'pool="big"' not in page


def test_histograms_have_edges_at_the_objectives():
    text = RouterMetrics().exposition(RouterCore(CoreConfig())).decode()
    for edge in ("0.3", "1.5"):
        assert f'router_ttft_seconds_bucket{{le="{edge}"}}' in text
