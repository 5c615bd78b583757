"""How the busiest models fare, from the real trace store to the metrics that rules read."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.metrics import TelemetryMetrics
from telemetry.model_watch import ModelWatch
from telemetry.rows import RowBatch
from telemetry.store import Store
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


def event(number: int, model: str, *, ttft_s: float, age_s: float = 30, status: int = 200):
    return RequestEvent(
        schema_version=1,
        event_id=f"{model}-{number}",
        received_at_unix_ms=int((time.time() - age_s) * 1000),
        tenant_id="a",
        model=model,
        endpoint="/v1/chat/completions",
        choices=1,
        is_stream=True,
        ttft_us=int(ttft_s * 1e6),
        total_us=int(ttft_s * 1e6) + 100_000,
        output_tokens=11,
        status=status,
    )


@pytest.mark.asyncio
async def test_ttft_and_goodput_are_told_of_the_20_busiest_models(store):
    events = [event(n, "slow", ttft_s=2.0 if n % 2 else 0.1) for n in range(60)]
    events += [event(n, "failing", ttft_s=0.1, status=503) for n in range(40)]
    events += [event(n, "past", ttft_s=2.0, age_s=900) for n in range(100)]
    for model in range(25):
        events += [event(n, f"m{model:02}", ttft_s=0.1) for n in range(2)]
    await store.insert(RowBatch(events))
    metrics = TelemetryMetrics()
    await ModelWatch(store, metrics).step()

    def told(gauge) -> dict[str, float]:
        return {it.labels["model"]: it.value for it in gauge.collect()[0].samples}

    requests = told(metrics.model_requests)
    assert len(requests) == 20
    assert (requests["slow"], requests["failing"]) == (60, 40)
    assert "past" not in requests
    ttft, goodput = told(metrics.model_ttft_s), told(metrics.model_goodput)
    assert ttft["slow"] == pytest.approx(2.0, rel=0.05)
    assert ttft["m00"] == pytest.approx(0.1, rel=0.05)
    assert "failing" not in ttft
    assert (goodput["slow"], goodput["failing"], goodput["m00"]) == (0.5, 0.0, 1.0)
