"""Tests the erasure of texts: valid tenant ids, the erased times, and failing deletions."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from control_plane.fields import is_id
from sluice.errors import BadRequestError
from telemetry.metrics import TelemetryMetrics
from telemetry.texts import SKEW_S, Eraser, erase_texts


class FakeStore:
    """A store that returns what a test sets, and records the statements."""

    local_database = "sluice"

    def __init__(self) -> None:
        self.to_erase: list[dict[str, Any]] = []
        self.mutations: list[dict[str, Any]] = []
        self.done: list[str] = []

    async def query(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        if "system.mutations" in sql:
            assert parameters == {"database": "sluice"}
            return self.mutations
        if "max(until) AS until FROM" in sql and "INNER JOIN" not in sql:
            return [{"until": 1_790_000_000_000}]
        return self.to_erase

    async def write(self, _sql: str, parameters: Mapping[str, Any]) -> int:
        self.done.append(f"write {parameters['tenant']} {parameters['skew_s']}")
        return 1

    async def delete(self, table: str, condition: str) -> None:
        self.done.append(f"delete {table} {condition}")

    async def end_failing_deletes(self, table: str) -> None:
        self.done.append(f"end {table}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("telemetry.texts.iso", str)
    return FakeStore()


@pytest.mark.parametrize("tenant", ["acme", "acme/eu", "a.b:c@d+e-f_g"])
async def test_a_tenant_of_any_name_can_be_erased(store: Any, tenant: str) -> None:
    assert is_id(tenant)
    await erase_texts(store, tenant)
    assert store.done == [f"write {tenant} {SKEW_S}"]  # the clock of a gateway may be ahead
    store.done.clear()
    store.to_erase = [{"tenant": tenant, "until_ms": 7}]
    await Eraser(store, TelemetryMetrics()).step()
    [deleted] = store.done
    assert deleted.startswith(f"delete texts tenant_id = '{tenant}' AND ")


@pytest.mark.parametrize("tenant", ["", "/a", "a'b", "a b", "a\\", "a" * 129])
async def test_malformed_tenant_names_reach_no_statement(store: Any, tenant: str) -> None:
    with pytest.raises(BadRequestError):
        await erase_texts(store, tenant)
    store.to_erase = [{"tenant": tenant, "until_ms": 7}]
    await Eraser(store, TelemetryMetrics()).step()
    assert store.done == []


async def test_a_failed_deletion_is_ended_and_begun_anew(store: Any) -> None:
    store.to_erase = [{"tenant": "acme", "until_ms": 7}]
    store.mutations = [{"mutation_id": "m1", "latest_fail_reason": "no room"}]
    await Eraser(store, TelemetryMetrics()).step()
    assert [it.split(" tenant_id")[0] for it in store.done] == ["end texts", "delete texts"]


async def test_while_the_server_is_at_it_nothing_is_begun(store: Any) -> None:
    store.to_erase = [{"tenant": "acme", "until_ms": 7}]
    store.mutations = [{"mutation_id": "m1", "latest_fail_reason": ""}]
    await Eraser(store, TelemetryMetrics()).step()
    assert store.done == []


async def test_the_age_of_undeleted_texts_is_shown(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("telemetry.texts.time.monotonic", lambda: now[0])
    metrics = TelemetryMetrics()
    eraser = Eraser(store, metrics)

    async def shown(at_s: float, *, is_left: bool) -> float | None:
        now[0] = at_s
        store.to_erase = [{"tenant": "acme", "until_ms": 7}] if is_left else []
        await eraser.step()
        return metrics.registry.get_sample_value("telemetry_text_erasure_age_seconds")

    assert await shown(100, is_left=True) == 0
    assert await shown(160, is_left=True) == 60
    assert await shown(180, is_left=False) == 0
    assert await shown(200, is_left=True) == 0
