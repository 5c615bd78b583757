"""The gateway's metrics are an interface: names, types and labels change on purpose only."""

from pathlib import Path

from aiohttp.test_utils import make_mocked_request

from gateway.app import Gateway
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from sluice.events import EventStats

GOLDEN = Path(__file__).with_name("metrics.golden")


class Events:
    """A producer without a thread: what a scrape asks of it."""

    stats = EventStats(*[0] * 9)

    def emit(self, payload: bytes) -> None: ...
    def put_on_disk(self) -> None: ...


def gateway(state_dir: Path) -> Gateway:
    settings = GatewaySettings(
        instance_id="g",
        http_address="127.0.0.1:1",
        control_address="127.0.0.1:1",
        state_dir=state_dir,
        artifacts_dir=state_dir,
        valkey_url="redis://127.0.0.1:1",
        kafka_bootstrap="127.0.0.1:1",
    )
    return Gateway(settings, Events())


async def test_names_and_types_are_as_documented(tmp_path: Path) -> None:
    lines = gateway(tmp_path).metrics.page().decode().splitlines()
    types = sorted(line for line in lines if line.startswith("# TYPE") and "_created" not in line)
    assert types == GOLDEN.read_text().splitlines()


async def test_a_caller_without_a_key_reads_all_metrics_but_tenants(tmp_path: Path) -> None:
    made = gateway(tmp_path)
    request = make_mocked_request("GET", "/metrics")
    inside = (await made.probes().metrics(request)).body.decode()
    public = (await made.routes().find("/metrics").handler("GET")(request)).body.decode()
    assert "gateway_tenant_tokens_total" in inside
    assert "gateway_tenant" not in public
    kinds = [line for line in inside.splitlines() if line.startswith("# TYPE")]
    assert set(kinds) - set(public.splitlines()) == {line for line in kinds if "_tenant_" in line}


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
