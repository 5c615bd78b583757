"""Tests that an offset is committed only after the rows of its messages are written."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry import sink as sink_module
from telemetry import text_rows
from telemetry.consumer import ConsumerLostError
from telemetry.metrics import TelemetryMetrics
from telemetry.rows import BrokerMessage, RowBatch
from telemetry.sink import Sink


class FakeBroker:
    """One partition that stores the committed offset. After `open`, reading begins there."""

    def __init__(self, count: int, failures: Sequence[bool]) -> None:
        self.log = [
            RequestEvent(
                schema_version=1, event_id=str(number), received_at_unix_ms=1_790_000_000_000
            ).SerializeToString()
            for number in range(count)
        ]
        self.committed = 0
        self.position = 0
        self.failures = list(failures)
        self.is_assigned = True
        self.missing = 0

    async def open(self) -> None:
        self._maybe_fail()
        self.position = self.committed

    async def read(self, batch_max: int) -> list[BrokerMessage]:
        await asyncio.sleep(0)
        self._maybe_fail()
        end = min(len(self.log), self.position + batch_max)
        found = [BrokerMessage("t", 0, at, self.log[at]) for at in range(self.position, end)]
        self.position = end
        return found

    async def written(self, messages: Sequence[BrokerMessage]) -> None:
        self.committed = max(self.committed, messages[-1].offset + 1)

    async def lag(self) -> int:
        return 0

    async def is_drained(self) -> bool:
        return self.position == len(self.log)

    async def close(self) -> None:
        pass

    def _maybe_fail(self) -> None:
        if self.failures and self.failures.pop():
            raise ConsumerLostError("as planned")


class FakeTable:
    """A table that fails as planned, perhaps after a write, and checks the order of inserts."""

    def __init__(self, broker: FakeBroker, failures: Sequence[str]) -> None:
        self.broker = broker
        self.rows: set[str] = set()
        self.failures = list(failures)

    async def prepare(self) -> None:
        pass

    async def insert(self, batch: RowBatch) -> None:
        plan = self.failures.pop() if self.failures else "ok"
        if plan != "lost":
            self.rows |= {event.event_id for event in batch.events}
        if plan != "ok":
            raise OSError(plan)

    def check(self) -> None:
        assert {str(number) for number in range(self.broker.committed)} <= self.rows


@settings(max_examples=60)
@given(
    count=st.integers(0, 30),
    batch_max=st.integers(1, 9),
    broken_reads=st.lists(st.booleans(), max_size=12),
    broken_writes=st.lists(st.sampled_from(["ok", "lost", "answer lost"]), max_size=12),
    kill_after=st.integers(0, 40),
)
def test_nothing_is_forgotten_before_it_is_written(
    count: int,
    batch_max: int,
    broken_reads: list[bool],
    broken_writes: list[str],
    kill_after: int,
) -> None:
    async def scenario() -> None:
        broker = FakeBroker(count, broken_reads)
        table = FakeTable(broker, broken_writes)

        async def serve(turns: int | None) -> None:
            sink = Sink(lambda: broker, table, TelemetryMetrics(), batch_max=batch_max)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(sink.run())
                while turns is None or turns > 0:
                    await asyncio.sleep(0)
                    table.check()
                    turns = None if turns is None else turns - 1
                    if turns is None and broker.committed == count:
                        break
                task.cancel()

        await serve(kill_after)  # the sink is killed at any point, and starts again
        await serve(None)
        assert table.rows == {str(number) for number in range(count)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module, "_PAUSE_FIRST_S", 0.0)
        asyncio.run(scenario())


async def test_draining_writes_the_messages_of_the_broker_and_ends() -> None:
    broker = FakeBroker(20, [])
    table = FakeTable(broker, [])
    sink = Sink(lambda: broker, table, TelemetryMetrics(), batch_max=3)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(sink.run())
        await asyncio.sleep(0)
        sink.drain()
    assert broker.committed == len(table.rows) == 20


async def test_draining_does_not_wait_for_a_table_that_is_away() -> None:
    broker = FakeBroker(20, [])
    table = FakeTable(broker, ["lost"] * 100)
    sink = Sink(lambda: broker, table, TelemetryMetrics(), batch_max=3)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(sink.run())
        await asyncio.sleep(0)
        sink.drain()
    assert (broker.committed, table.rows) == (0, set())


class LossyBroker(FakeBroker):
    """A broker that has deleted three messages."""

    async def read(self, batch_max: int) -> list[BrokerMessage]:
        self.missing = 3
        return await super().read(batch_max)


async def test_errors_of_texts_are_not_counted_as_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "_PAUSE_FIRST_S", 0.0)
    broker, metrics = LossyBroker(2, []), TelemetryMetrics()
    sink = Sink(
        lambda: broker,
        FakeTable(broker, ["lost"]),
        metrics,
        batch_max=3,
        decode=text_rows.decode,  # no message of this topic is a text
        are_texts=True,
    )
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        task = group.create_task(sink.run())
        while broker.committed < 2:  # noqa: ASYNC110 - the fake broker has no event to wait for
            await asyncio.sleep(0)
        task.cancel()
    names = ("poisoned_total", "missing_total", "write_failures_total", "session_failures_total")
    told = {
        sample.name: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.value and sample.name.endswith(names)
    }
    assert told == {
        "telemetry_text_messages_missing_total": 3,
        "telemetry_text_messages_poisoned_total": 2,
        "telemetry_text_write_failures_total": 1,
    }


def test_the_metrics_are_known() -> None:
    names = {metric.name for metric in TelemetryMetrics().registry.collect()}
    assert names == {
        "llm_ledger_mismatch_tokens",
        *("llm_model_goodput_ratio", "llm_model_requests_count", "llm_model_ttft_p99_seconds"),
        *(f"llm_release_judged_{it}" for it in ("count", "drop_ratio", "good_ratio")),
        "llm_replica_hour_price",
        "mtls_certificate_expiry_seconds",
        "telemetry_closings_written",
        "telemetry_events_duplicate",
        "telemetry_events_written",
        "telemetry_ingested_until_seconds",
        "telemetry_lag_events",
        "telemetry_ledger_compared_seconds",
        "telemetry_messages_forged",
        "telemetry_messages_missing",
        "telemetry_messages_poisoned",
        "telemetry_ready",
        "telemetry_requests_closed",
        "telemetry_rolled_up_seconds",
        "telemetry_rollup_marks",
        "telemetry_session_failures",
        "telemetry_spans_dropped",
        "telemetry_spans_exported",
        "telemetry_text_erasure_age_seconds",
        "telemetry_text_lag_events",
        "telemetry_text_messages_forged",
        "telemetry_text_messages_missing",
        "telemetry_text_messages_poisoned",
        "telemetry_text_ready",
        "telemetry_text_session_failures",
        "telemetry_text_write_failures",
        "telemetry_text_write_seconds",
        "telemetry_texts_duplicate",
        "telemetry_texts_written",
        "telemetry_write_failures",
        "telemetry_write_seconds",
    }
