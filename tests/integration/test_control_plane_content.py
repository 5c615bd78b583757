"""Keys of contents on a real PostgreSQL, and contents that are deleted when their time is over."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, insert, select

from control_plane.batches.tables import batches
from control_plane.content.repository import now_unix_ms
from control_plane.content.retention import ContentRetention
from control_plane.database import Database
from control_plane.records import repository as records_of
from control_plane.records.repository import NoRecordError
from control_plane.records.tables import record_items, records
from control_plane.responses import repository as responses_of
from control_plane.responses.tables import responses
from control_plane.tables import content_keys, tenants, tiers
from sluice.ids import base32
from sluice.sealing import Sealer
from sluice.shared_secret import SharedSecret, ours
from sluice.stored_content import CHAT_COMPLETION, CONVERSATION, SEALED_FOR, key_place
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.state.v1 import state_pb2 as wire

pytestmark = pytest.mark.real

TENANT = "content-of"
KEY = f"/v1/tenants/{TENANT}/content-key"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    await shared_control_plane.put("tiers/content")
    await shared_control_plane.put(f"tenants/{TENANT}", tier_id="content", retention_hours=5)
    return shared_control_plane


@pytest.mark.asyncio(loop_scope="session")
async def test_keys_reach_gateways_sealed_and_are_never_shown(plane, eventually) -> None:
    assert (await plane.admin.get(KEY)).json()["keys"] == []
    made = await plane.admin.post(KEY)
    assert made.status_code == 200, made.text
    assert [it["number"] for it in made.json()["keys"]] == [1]
    assert (await plane.admin.post(KEY)).status_code == 200
    watcher = ControlWatcher(plane.grpc_address, control.ROLE_GATEWAY, "content")
    told = lambda: watcher.state.content_keys.get(TENANT, control.ContentKeys())  # noqa: E731
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: len(told().keys) == 2, "both are known")
        assert watcher.state.tenants[TENANT].retention_hours == 5
        sealed, sealer = told().keys[0].sealed, Sealer(ours(), SEALED_FOR)
        secret = sealer.opened(sealed, key_place(TENANT, 1))
        assert (await plane.admin.delete(KEY)).status_code == 204
        await eventually(lambda: [it.number for it in told().keys] == [3], "the old ones are gone")
        shown = (await plane.admin.get(KEY)).json()
        assert shown["erased_at_unix_ms"] == told().erased_at_unix_ms > 0
        query = {"kind": "content-keys", "object_id": TENANT}
        rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
        assert [row["action"] for row in rows] == ["erase", "rotate", "rotate"]
        assert not any(it in json.dumps([rows, shown]) for it in (sealed, secret))
        running.cancel()
    assert (await plane.admin.post("/v1/tenants/nobody/content-key")).status_code == 404
    assert (await plane.admin.get("/v1/tenants/nobody/content-key")).status_code == 404


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    made = Database(database_url)

    async def fill(connection: Any) -> None:
        await connection.execute(insert(tiers).values(id="t"))
        for name, hours in (("short", 2), ("long", 0), ("erased", 0)):
            row = {"id": name, "tier_id": "t", "cache_salt": b"s", "weight": 1}
            await connection.execute(insert(tenants).values(**row, retention_hours=hours))

    await made.run(fill)
    yield made
    await made.close()


def _response(tenant_id: str, age_ms: int, number: int) -> wire.StoredResponse:
    created_ms = now_unix_ms() - age_ms
    response_id = f"resp_{base32(created_ms, 10)}{base32(number, 32)}"
    return wire.StoredResponse(
        id=response_id, tenant_id=tenant_id, created_at_unix_ms=created_ms, response=b"{}"
    )


async def _keep(database: Database, tenant_id: str, ages_ms: list[int], offset: int) -> None:
    turns = [_response(tenant_id, age, offset + n) for n, age in enumerate(ages_ms)]
    await database.run(lambda connection: responses_of.keep(connection, turns))


async def _record(database: Database, tenant_id: str, kind: str, age_ms: int) -> str:
    record_id = f"{tenant_id}-{kind}-{age_ms}"
    created_ms = now_unix_ms() - age_ms

    async def work(connection: Any) -> None:
        row = {"id": record_id, "tenant_id": tenant_id, "kind": kind, "model": "", "metadata": {}}
        times = {"created_at_unix_ms": created_ms, "touched_at_unix_ms": created_ms}
        await connection.execute(insert(records).values(**row, **times, content=b"{}"))
        item = {"record_id": record_id, "id": "i", "content": b"{}"}
        await connection.execute(insert(record_items).values(**item))

    await database.run(work)
    return record_id


async def _counts(database: Database) -> dict[str, int]:
    async def work(connection: Any) -> dict[str, int]:
        t = responses.c
        found = await connection.execute(select(t.tenant_id, func.count()).group_by(t.tenant_id))
        return {str(tenant_id): count for tenant_id, count in found}

    return await database.run(work)


async def _ids(database: Database, table: Any) -> set[str]:
    async def work(connection: Any) -> set[str]:
        return set((await connection.execute(select(table.c.id))).scalars())

    return await database.run(work)


async def test_each_tenant_has_its_own_time(database: Database) -> None:
    # More than one round deletes, of a day before, too; days as such are the platform's.
    await _keep(database, "short", [HOUR_MS + 1000] * 3 + [2 * HOUR_MS + 1000] * 1200, 0)
    await _keep(database, "short", [DAY_MS] * 2, 2000)
    await _keep(database, "long", [0, 2 * DAY_MS, 9 * DAY_MS], 3000)
    await _keep(database, "nobody", [0], 4000)
    kept = {
        await _record(database, "short", CONVERSATION, HOUR_MS),
        await _record(database, "short", "file", 3 * HOUR_MS),
        await _record(database, "long", CHAT_COMPLETION, 3 * HOUR_MS),
    }
    for kind in (CONVERSATION, CHAT_COMPLETION):
        await _record(database, "short", kind, 2 * HOUR_MS + 1000)
    await _record(database, "long", CHAT_COMPLETION, 8 * DAY_MS)
    await _record(database, "nobody", CHAT_COMPLETION, 0)
    sealer = Sealer(SharedSecret(["s" * 32]), SEALED_FOR)
    await ContentRetention(database, sealer, kept_days=7).step()
    assert await _counts(database) == {"short": 3, "long": 2}
    assert await _ids(database, records) == kept
    assert await _ids(database, record_items) == {"i"}


async def test_an_erasure_ends_everything_from_before(database: Database) -> None:
    old, new = SharedSecret(["o" * 32]), SharedSecret(["n" * 32, "o" * 32])
    sealed = Sealer(old, SEALED_FOR).seal("ab" * 32, key_place("erased", 4))
    keys = [{"number": 4, "sealed": sealed, "made_at_unix_ms": 1}]
    await _keep(database, "erased", [HOUR_MS, 2 * HOUR_MS], 0)
    await _keep(database, "long", [HOUR_MS], 10)
    gone = await _record(database, "erased", CONVERSATION, HOUR_MS)
    await _record(database, "erased", "file", HOUR_MS)
    at_ms = now_unix_ms() - 1000

    async def erase(connection: Any) -> None:
        row = {"id": "erased", "keys": keys, "erased_at_unix_ms": at_ms}
        await connection.execute(insert(content_keys).values(**row))
        batch = dict.fromkeys(("key_id", "endpoint", "input_file_id", "status"), "x")
        files = dict.fromkeys(("output_file_id", "error_file_id"), "")
        counts = dict.fromkeys(("total", "completed", "failed"), 0)
        times = dict.fromkeys(("created_at_unix_ms", "expires_at_unix_ms", "taken_at_unix_ms"), 5)
        more = {"metadata": {}, "reached_at_unix_ms": {}, "errors": b""}
        ids = {"id": "b", "tenant_id": "erased"}
        rows = insert(batches).values(**batch, **files, **counts, **times, **more, **ids)
        await connection.execute(rows)

    await database.run(erase)
    with pytest.raises(NoRecordError):  # at once, before any row is deleted
        await database.run(lambda c: records_of.show(c, "erased", gone))
    after = await _record(database, "erased", CONVERSATION, 0)
    await ContentRetention(database, Sealer(new, SEALED_FOR), kept_days=7).step()
    assert await _counts(database) == {"long": 1}
    assert await _ids(database, records) == {after}
    assert await _ids(database, batches) == set()

    async def sealed_now(connection: Any) -> str:
        return (await connection.execute(select(content_keys.c["keys"]))).scalar_one()[0]["sealed"]

    alone = Sealer(SharedSecret(["n" * 32]), SEALED_FOR)
    opened = alone.opened(await database.run(sealed_now), key_place("erased", 4))
    assert opened == "ab" * 32, "it was sealed anew, with the newest secret"
