"""The gateway's metrics are an interface: names, types and labels change on purpose only."""

from pathlib import Path

from gateway.app import Gateway
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from sluice.events import EventStats

GOLDEN = Path(__file__).with_name("metrics.golden")


class Events:
    """A producer without a thread: what a scrape asks of it."""

    stats = EventStats(*[0] * 9)

    def emit(self, payload: bytes) -> None: ...


async def test_names_and_types_are_as_documented(tmp_path: Path) -> None:
    settings = GatewaySettings(
        instance_id="g",
        http_address="127.0.0.1:1",
        control_address="127.0.0.1:1",
        state_dir=tmp_path,
        artifacts_dir=tmp_path,
        valkey_url="redis://127.0.0.1:1",
        kafka_bootstrap="127.0.0.1:1",
    )
    lines = Gateway(settings, Events()).metrics.page().decode().splitlines()
    types = sorted(line for line in lines if line.startswith("# TYPE") and "_created" not in line)
    assert types == GOLDEN.read_text().splitlines()


def test_histograms_are_cumulative_with_edges_at_the_objectives() -> None:
    metrics = GatewayMetrics()
    for value in (0.2, 0.3, 1.5, 99.0):
        metrics.ttft.observe(value)
    text = metrics.page().decode()
    assert 'llm_ttft_seconds_bucket{le="0.3"} 2.0' in text
    assert 'llm_ttft_seconds_bucket{le="1.5"} 3.0' in text
    assert 'llm_ttft_seconds_bucket{le="+Inf"} 4.0' in text
    assert "llm_ttft_seconds_count 4.0" in text
    assert "llm_ttft_seconds_sum 101.0" in text
