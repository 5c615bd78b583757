"""Idempotency keys and conditions of writes on a real PostgreSQL."""

import asyncio
import os
import signal
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.app import admin_routes
from control_plane.audit.repository import prune_answers
from control_plane.database import Database
from control_plane.http.routes import AdminRoute
from control_plane.http.server import make_application
from tests.integration.conftest import ADMIN_KEY

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane):
    await shared_control_plane.put("tiers/writes")
    await shared_control_plane.put("tenants/writes", tier_id="writes")
    return shared_control_plane


@pytest_asyncio.fixture(loop_scope="session")
async def sql(plane):
    url = plane.spec.env["CONTROL_PLANE__DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


WAITING = text("SELECT count(*) FROM pg_locks WHERE NOT granted")


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def done_rows(sql, key: str) -> int:
    query = "SELECT count(*) FROM audit WHERE idempotency_key = $1 AND outcome = 'done'"
    return await sql.fetchval(query, key)


async def test_the_same_request_gets_the_same_answer_and_is_done_once(plane, sql) -> None:
    admin = plane.admin
    body = {"rpm": 7}
    first = await admin.put("/v1/tiers/writes-once", json=body, headers=keyed("once"))
    assert (first.status_code, "Idempotency-Replayed" in first.headers) == (201, False)
    await plane.put("tiers/writes-once", rpm=8)  # somebody else's, meanwhile
    again = await admin.put("/v1/tiers/writes-once", json=body, headers=keyed("once"))
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (201, "true")
    assert (again.text, again.headers["ETag"]) == (first.text, first.headers["ETag"])
    assert (await admin.get("/v1/tiers/writes-once")).json()["rpm"] == 8
    assert await done_rows(sql, "once") == 1
    for _ in range(2):
        gone = await admin.delete("/v1/tiers/writes-once", headers=keyed("once-gone"))
        assert (gone.status_code, gone.content) == (204, b"")
    assert await done_rows(sql, "once-gone") == 1


async def test_a_key_is_for_one_request_of_one_caller(plane) -> None:
    admin = plane.admin
    path = "/v1/tiers/writes-one"
    await admin.put(path, json={"rpm": 1}, headers=keyed("one"))
    for method, other, body in (
        ("PUT", path, {"rpm": 2}),
        ("PUT", f"{path}-b", {"rpm": 1}),
        ("DELETE", path, {"rpm": 1}),
    ):
        answer = await admin.request(method, other, json=body, headers=keyed("one"))
        seen = (answer.status_code, answer.json()["code"], answer.json()["param"])
        assert seen == (422, "idempotency_key_reused", "Idempotency-Key")
    made = (await admin.post("/v1/admin-keys", json={"role": "admin"})).json()
    headers = keyed("one") | {"Authorization": f"Bearer {made['key']}"}
    answer = await admin.put(path, json={"rpm": 2}, headers=headers)
    assert (answer.status_code, answer.json()["rpm"]) == (200, 2)
    answer = await admin.put(path, json={}, headers=keyed("x" * 129))
    assert (answer.status_code, answer.json()["param"]) == (400, "Idempotency-Key")


async def test_the_text_of_a_key_is_not_shown_again(plane, sql) -> None:
    path = "/v1/tenants/writes/keys"
    made = (await plane.admin.post(path, json={}, headers=keyed("shown"))).json()
    again = await plane.admin.post(path, json={}, headers=keyed("shown"))
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert made["id"] in again.json()["detail"]
    assert "rotate it" in again.json()["detail"]
    assert await done_rows(sql, "shown") == 1


async def test_a_refused_write_may_be_retried(plane) -> None:
    path, body = "/v1/tenants/writes-later", {"tier_id": "writes-later"}
    assert (await plane.admin.put(path, json=body, headers=keyed("later"))).status_code == 400
    await plane.put("tiers/writes-later")
    assert (await plane.admin.put(path, json=body, headers=keyed("later"))).status_code == 201


async def test_many_at_once_with_one_key_are_one(plane, sql) -> None:
    async def post() -> httpx.Response:
        return await plane.admin.post("/v1/tenants/writes/keys", json={}, headers=keyed("many"))

    answers = await asyncio.gather(*(post() for _ in range(12)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [201] + [409] * 11
    assert await done_rows(sql, "many") == 1


async def test_a_second_write_during_the_first_is_refused(plane, sql, eventually) -> None:
    await plane.put("tiers/writes-slow")
    async with asyncio.TaskGroup() as tasks:
        async with sql.transaction():
            await sql.execute("SELECT 1 FROM tiers WHERE id = 'writes-slow' FOR UPDATE")
            path = "/v1/tiers/writes-slow"
            waiting = tasks.create_task(plane.admin.put(path, json={}, headers=keyed("slow")))

            async def is_waiting() -> bool:
                query = (
                    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    " AND wait_event IN ('transactionid', 'tuple')"
                )
                return bool(await sql.fetchval(query))

            await eventually(is_waiting, "the first request waits for the row")
            second = await plane.admin.put(path, json={}, headers=keyed("slow"))
            assert (second.status_code, second.headers["Retry-After"]) == (409, "1")
            assert "under way" in second.json()["detail"]
        assert (await waiting).status_code == 200


async def test_keys_are_forgotten_after_a_day(plane, sql) -> None:
    path, database = "/v1/tiers/writes-old", Database(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])
    await plane.admin.put(path, json={"rpm": 1}, headers=keyed("old"))
    age = "UPDATE idempotent_answers SET created_at = now() - interval '1 day 1 second'"
    await sql.execute(f"{age} WHERE key = 'old'")
    answer = await plane.admin.put(path, json={"rpm": 2}, headers=keyed("old"))
    assert (answer.status_code, answer.json()["rpm"]) == (200, 2)
    await plane.admin.put(path, json={"rpm": 3}, headers=keyed("young"))
    await sql.execute(f"{age} WHERE key = 'old'")
    await database.run(prune_answers)
    await database.close()
    keys = "SELECT key FROM idempotent_answers WHERE key IN ('old', 'young')"
    assert [row["key"] for row in await sql.fetch(keys)] == ["young"]


async def test_the_leader_prunes_old_answers_and_audit_rows(
    database_url, tmp_path, start_control_plane, eventually
) -> None:
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        await connection.execute(
            "INSERT INTO idempotent_answers (actor_id, key, request_sha256, status, created_at)"
            " VALUES ('a', 'old', '', 200, now() - interval '25 h'), ('a', 'new', '', 200, now())"
        )
        await connection.execute(
            "INSERT INTO audit (id, at, actor_id, actor_role, action, kind, object_id, outcome,"
            " request_id) SELECT id, now() - age, 'a', 'admin', 'create', 'k', 'o', 'done', ''"
            " FROM (VALUES ('old', interval '11 d'), ('new', interval '9 d')) AS rows (id, age)"
        )

        async def is_pruned() -> bool:
            counts = [
                await connection.fetchval(f"SELECT count(*) FROM {table}")
                for table in ("idempotent_answers", "audit")
            ]
            return counts == [1, 1]

        async with start_control_plane(database_url, tmp_path, CONTROL_PLANE__AUDIT_DAYS="10"):
            await eventually(is_pruned, "the old ones are gone")
        assert await connection.fetchval("SELECT key FROM idempotent_answers") == "new"
        assert await connection.fetchval("SELECT id FROM audit") == "new"
    finally:
        await connection.close()


async def test_a_kill_separates_no_write_from_its_answer(
    database_url, tmp_path, start_control_plane
) -> None:
    """Whoever asks again after the kill gets each write done exactly once."""
    paths = [f"/v1/tiers/kill{number}" for number in range(120)]

    async def put(plane, path: str) -> int:
        answer = await plane.admin.put(path, json={"rpm": 1}, headers=keyed(path))
        return answer.status_code

    async with start_control_plane(database_url, tmp_path) as doomed:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_or_none(put(doomed, path))) for path in paths]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            os.kill(doomed.child.pid, signal.SIGKILL)
        assert None in {task.result() for task in asked}, "the kill came too late to matter"
    async with start_control_plane(database_url, tmp_path) as plane:
        again = [await put(plane, path) for path in paths]
        assert set(again) == {201}, "new, or as it was answered first"
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        counted = await connection.fetch(
            "SELECT object_id, count(*) AS n FROM audit WHERE outcome = 'done' GROUP BY 1"
        )
        assert {row["object_id"]: row["n"] for row in counted} == {
            path.rpartition("/")[2]: 1 for path in paths
        }
    finally:
        await connection.close()


async def _or_none(asked: Any) -> int | None:
    try:
        return await asked
    except httpx.TransportError:
        return None


class LosesCommits(Database):
    """Commits, and then loses the connection, once for each piece of work."""

    async def _run_once(self, work: Any, isolation: str) -> Any:
        result = await super()._run_once(work, isolation)
        if work not in self.lost:
            self.lost.append(work)
            raise OSError("the connection was lost")
        return result

    lost: list[Any]


async def test_a_commit_with_a_lost_answer_is_not_repeated(plane, sql) -> None:
    database = LosesCommits(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])
    database.lost = []
    bootstrap = plane.spec.env["CONTROL_PLANE__ADMIN_KEY_SHA256"]
    application = make_application(
        admin_routes(database), database, bootstrap, lambda route, status: None
    )
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "x-request-id": "lost-commit"}
    async with TestClient(TestServer(application)) as client:
        made = await client.post("/v1/tenants/writes/keys", json={}, headers=headers)
        assert made.status == 201
        key_id = (await made.json())["id"]
        rotated = await client.post(f"/v1/tenants/writes/keys/{key_id}/rotate", headers=headers)
        assert rotated.status == 201
        removed = await client.delete(f"/v1/tenants/writes/keys/{key_id}", headers=headers)
        assert removed.status == 204
    await database.close()
    query = "SELECT action FROM audit WHERE request_id = 'lost-commit' ORDER BY id"
    actions = [row["action"] for row in await sql.fetch(query)]
    assert sorted(actions) == ["create", "create", "revoke", "rotate"]


class CommitsLate(Database):
    """Loses the connection of the first attempt, which is committed while the second runs."""

    late: asyncio.TaskGroup
    lost: list[Any]

    async def _run_once(self, work: Any, isolation: str) -> Any:
        if work in self.lost:
            return await super()._run_once(work, isolation)
        self.lost.append(work)
        connection = self.dedicated()
        await connection.start()
        await connection.begin()
        await work(connection)
        self.late.create_task(self._commit(connection))
        raise OSError("the connection was lost")

    async def _commit(self, connection: AsyncConnection) -> None:
        """Commit once somebody waits for it."""
        async with self._engine.connect() as other:
            while not await other.scalar(WAITING):
                await other.rollback()
                await asyncio.sleep(0.01)
        await connection.commit()
        await connection.close()


async def test_a_commit_that_comes_late_is_waited_for(plane, sql) -> None:
    database = CommitsLate(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])
    database.lost = []
    bootstrap = plane.spec.env["CONTROL_PLANE__ADMIN_KEY_SHA256"]
    application = make_application(
        admin_routes(database), database, bootstrap, lambda route, status: None
    )
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "x-request-id": "late-commit"}
    new = {"If-None-Match": "*", "Idempotency-Key": "late-tier"}
    async with (
        asyncio.TaskGroup() as database.late,
        TestClient(TestServer(application)) as client,
    ):
        made = await client.put("/v1/tiers/writes-late", json={}, headers=headers | new)
        assert (made.status, "Idempotency-Replayed" in made.headers) == (201, False)
        made = await client.post("/v1/tenants/writes/keys", json={}, headers=headers)
        assert made.status == 201
        assert (await made.json())["key"].startswith("sk-sluice-")
    await database.close()
    rows = await sql.fetch("SELECT kind FROM audit WHERE request_id = 'late-commit' ORDER BY id")
    assert [row["kind"] for row in rows] == ["tiers", "keys"]


async def test_a_tag_is_the_same_wherever_it_is_shown(plane) -> None:
    admin = plane.admin
    put = await admin.put("/v1/tiers/writes-tag", json={"model_limits": {}, "rpm": 3})
    got = await admin.get("/v1/tiers/writes-tag")
    assert put.headers["ETag"] == got.headers["ETag"]
    key = (await admin.post("/v1/tenants/writes/keys", json={"models": ["b", "a"]})).json()
    one = f"/v1/tenants/writes/keys/{key['id']}"
    shown = (await admin.get(one)).headers["ETag"]
    assert (await admin.patch(one, json={})).headers["ETag"] == shown
    assert (await admin.patch(one, json={"rpm": 1})).headers["ETag"] != shown
    for path in (one, "/v1/tiers", "/v1/tiers/writes-tag", "/v1/admin-keys", "/v1/nodes"):
        known = {"If-None-Match": (await admin.get(path)).headers["ETag"]}
        same = await admin.get(path, headers=known)
        assert (same.status_code, same.content) == (304, b""), path


async def test_conditions_are_checked_before_anything_happens(plane) -> None:
    admin, path = plane.admin, "/v1/tiers/writes-if"
    first = {"If-None-Match": "*"}
    assert (await admin.put(path, json={"rpm": 1}, headers=first)).status_code == 201
    old = (await admin.get(path)).headers["ETag"]
    await plane.put("tiers/writes-if", rpm=2)
    for method, headers in (
        ("PUT", first),
        ("PUT", {"If-Match": old}),
        ("DELETE", {"If-Match": old}),
        ("DELETE", {"If-Match": '"none"'}),
    ):
        answer = await admin.request(method, path, json={}, headers=headers)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (412, "precondition_failed"), problem
        assert (problem["param"], "read it" in problem["detail"]) == (next(iter(headers)), True)
    wrong = await admin.put(path, json={}, headers={"If-Match": "no-quotes"})
    assert (wrong.status_code, wrong.json()["param"]) == (400, "If-Match")
    missing = await admin.put("/v1/tiers/writes-none", json={}, headers={"If-Match": "*"})
    assert missing.status_code == 412
    now = {"If-Match": (await admin.get(path)).headers["ETag"]}
    assert (await admin.delete(path, headers=now)).status_code == 204
    key = (await admin.post("/v1/tenants/writes/keys", json={})).json()
    one = f"/v1/tenants/writes/keys/{key['id']}"
    for method, target in (("PATCH", one), ("DELETE", one), ("POST", f"{one}/rotate")):
        answer = await admin.request(method, target, json={}, headers={"If-Match": '"x"'})
        assert answer.status_code == 412, method


@pytest.mark.parametrize("is_new", [True, False])
async def test_of_two_writers_with_one_view_one_wins(plane, sql, is_new: bool) -> None:
    admin = plane.admin
    for attempt in range(10):
        path = f"/v1/tiers/writes-race-{is_new}-{attempt}"
        condition = {"If-None-Match": "*"}
        if not is_new:
            await admin.put(path, json={})
            condition = {"If-Match": (await admin.get(path)).headers["ETag"]}
        racing = (admin.put(path, json={"rpm": n + 1}, headers=condition) for n in range(4))
        answers = await asyncio.gather(*racing)
        won = [answer for answer in answers if answer.is_success]
        assert [answer.status_code for answer in won] == [201 if is_new else 200]
        assert {answer.status_code for answer in answers} == {won[0].status_code, 412}
        assert (await admin.get(path)).json() == won[0].json()


async def test_concurrent_writes_are_recorded_one_after_the_other(plane) -> None:
    """Each row's `before` is the `after` of the one before."""
    admin, path = plane.admin, "/v1/tiers/writes-chain"
    await asyncio.gather(*(admin.put(path, json={"rpm": n + 1}) for n in range(12)))
    rows = (await admin.get("/v1/audit?object_id=writes-chain")).json()["data"]
    followers = {str(row["before"]): row["after"] for row in rows}
    assert len(followers) == len(rows) == 12
    state, chain = None, 0
    while str(state) in followers:
        state, chain = followers.pop(str(state)), chain + 1
    assert (chain, state) == (12, (await admin.get(path)).json())


async def test_an_undeclared_route_is_forbidden_to_all(plane) -> None:
    database = Database(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])

    async def hidden(_: web.Request) -> web.Response:
        return web.json_response({})

    bootstrap = plane.spec.env["CONTROL_PLANE__ADMIN_KEY_SHA256"]
    application = make_application([], database, bootstrap, lambda route, status: None)
    application.router.add_get("/v1/hidden", hidden)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with TestClient(TestServer(application)) as client:
        assert (await client.get("/v1/hidden")).status == 401
        assert (await client.get("/v1/hidden", headers=headers)).status == 404
    await database.close()


async def test_a_write_that_leaves_no_row_is_a_bug(plane) -> None:
    """Handlers of every domain are held to it."""
    database = Database(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])

    async def silent(_: web.Request) -> web.Response:
        return web.json_response({})

    routes = [
        AdminRoute("POST", "/v1/silent", silent, Action.WRITE_FLEET, "silent"),
        AdminRoute("POST", "/v1/piece", silent, Action.WRITE_FLEET, "piece", is_audited=False),
    ]
    bootstrap = plane.spec.env["CONTROL_PLANE__ADMIN_KEY_SHA256"]
    application = make_application(routes, database, bootstrap, lambda route, status: None)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with TestClient(TestServer(application)) as client:
        assert (await client.post("/v1/silent", headers=headers)).status == 500
        assert (await client.post("/v1/piece", headers=headers)).status == 200
    await database.close()


MODEL = {"base_digest": "e" * 64, "pool_id": "writes"}


async def put_base(plane) -> None:
    await plane.put("bases/" + "e" * 64, context_tokens_max=64)
    await plane.put("pools/writes", base_digest="e" * 64, engine="sim")


async def edited(admin, path: str, method: str = "PUT", **changes: object) -> httpx.Response:
    """GET, change, and send all of it back."""
    found = await admin.get(path)
    assert found.status_code == 200, found.text
    headers = {"If-Match": found.headers["ETag"]}
    return await admin.request(method, path, json=found.json() | changes, headers=headers)


async def test_the_answer_of_a_get_can_be_edited_and_sent_back(plane) -> None:
    admin = plane.admin
    await put_base(plane)
    await plane.put("models/writes-edited", **MODEL)
    await plane.put("aliases/writes-alias", target="writes-edited")
    await plane.put("tenants/writes/budgets/edited", unit="tokens", amount=10, period="day")
    key = (await admin.post("/v1/tenants/writes/keys", json={})).json()["id"]
    for path, changes in (
        ("tiers/writes", {"rpm": 77}),
        ("tenants/writes", {"name": "Edited"}),
        ("bases/" + "e" * 64, {"name": "edited"}),
        ("models/writes-edited", {}),
        ("models/writes-edited/rollout-plan", {}),
        ("aliases/writes-alias", {}),
        ("tenants/writes/budgets/edited", {"amount": 20}),
        ("text-policies/writes", {"share_percent": 5}),
    ):
        if path.startswith("text-policies"):
            await plane.put(path)
        answer = await edited(admin, f"/v1/{path}", **changes)
        assert answer.status_code == 200, (path, answer.text)
        assert changes.items() <= answer.json().items()
    answer = await edited(admin, f"/v1/tenants/writes/keys/{key}", "PATCH", rpm=3)
    assert (answer.status_code, answer.json()["rpm"]) == (200, 3)


async def test_a_read_only_field_that_was_changed_is_refused_by_name(plane) -> None:
    admin = plane.admin
    await put_base(plane)
    answer = await edited(admin, "/v1/tiers/writes", id="another")
    assert (answer.status_code, answer.json()["param"]) == (400, "id")
    assert "as GET shows it" in answer.json()["detail"]
    answer = await admin.put("/v1/tiers/writes-new", json={"id": "writes-new", "rpm": 1})
    assert answer.status_code == 201, "what the path says may be repeated"
    answer = await admin.put("/v1/models/writes-new", json=MODEL | {"created_at_unix_s": 1})
    assert (answer.status_code, answer.json()["param"]) == (400, "created_at_unix_s")
    answer = await admin.put("/v1/tiers/writes", json={"no_such_field": 1})
    assert (answer.status_code, answer.json()["param"]) == (400, "no_such_field")


async def test_a_collection_is_never_taken_for_an_id(plane) -> None:
    admin = plane.admin
    for method, path, allowed in (
        ("DELETE", "artifacts/uploads", "GET,HEAD,POST"),
        ("GET", "artifacts/imports", "POST"),
        ("DELETE", "artifacts/garbage", "GET,HEAD"),
        ("PUT", "models/some/name/golden-prompts", "GET,HEAD,POST"),
        ("DELETE", "models/some/name/golden-prompts", "GET,HEAD,POST"),
        ("GET", "models/some/name/versions/1", "PUT"),
        ("POST", "tiers", "GET,HEAD"),
    ):
        answer = await admin.request(method, f"/v1/{path}", json={})
        assert (answer.status_code, answer.headers.get("Allow")) == (405, allowed), (method, path)
        assert answer.json()["code"] == "method_not_allowed"
    assert (await admin.get("/v1/models/some/name/golden-prompts/x/y")).status_code == 404
