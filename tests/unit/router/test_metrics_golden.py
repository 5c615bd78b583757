"""The router's metrics are an interface: names, types and labels change on purpose only."""

from pathlib import Path

from router.core.model import CoreConfig, Stats
from router.core.router import RouterCore
from router.metrics import RouterMetrics

GOLDEN = Path(__file__).with_name("metrics.golden")


def test_names_and_types_are_as_documented():
    metrics = RouterMetrics()
    metrics.take(Stats(outcomes={("stop", ""): 2}, ttft_s=[0.1], queue_s=[0.2], tokens=3))
    lines = metrics.exposition(RouterCore(CoreConfig())).decode().splitlines()
    types = sorted(line for line in lines if line.startswith("# TYPE") and "_created" not in line)
    assert types == GOLDEN.read_text().splitlines()
    assert 'router_outcomes_total{code="",kind="stop"} 2.0' in lines
    assert "router_tokens_total 3.0" in lines


def test_histograms_have_edges_at_the_objectives():
    text = RouterMetrics().exposition(RouterCore(CoreConfig())).decode()
    for edge in ("0.3", "1.5"):
        assert f'router_ttft_seconds_bucket{{le="{edge}"}}' in text
