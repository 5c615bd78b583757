"""Files and batches: from JSONL to JSONL, over a control plane's own service on real PostgreSQL."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from control_plane.batches.loop import BatchLoop
from control_plane.batches.service import BatchService
from control_plane.database import Database
from control_plane.records.service import RecordService
from gateway.files import store as files
from sluice.shared_secret import ours as shared_secret
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY, OTHER_KEY
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

FILES, BATCHES = "/v1/files", "/v1/batches"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    made = Database(database_url)
    yield made
    await made.close()


@pytest.fixture
def batching(world: Any, database: Database) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Any]:
        services = RecordService(database), BatchService(database)
        async with world(*services, **settings) as w:
            w.loop = BatchLoop(database, shared_secret())
            yield w

    return start


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked | body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join([json.dumps(it).encode() + b"\n" for it in lines])


async def uploaded(http: httpx.AsyncClient, content: bytes) -> dict[str, Any]:
    answer = await http.post(
        FILES, data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def begun(http: httpx.AsyncClient, lines: Sequence[Any], url: str = CHAT) -> dict[str, Any]:
    file = await uploaded(http, jsonl(lines))
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    answer = await http.post(BATCHES, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(w: Any, http: httpx.AsyncClient, batch_id: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            await w.loop.step()
            batch = (await http.get(f"{BATCHES}/{batch_id}")).json()
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(0.1)


async def content(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    answer = await http.get(f"{FILES}/{file_id}/content")
    return [json.loads(it) for it in answer.text.splitlines()]


async def test_a_life_of_a_file(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batching() as w, w.http() as http, w.http(OTHER_KEY) as foreign, w.sdk() as sdk:
        big = b"x" * 2_500_000
        made = await uploaded(http, big)
        assert (made["object"], made["bytes"], made["status"]) == ("file", len(big), "processed")
        url = f"{FILES}/{made['id']}"
        assert (await http.get(url)).json() == made
        assert (await http.get(f"{url}/content")).content == big
        other = await sdk.files.create(file=b"{}", purpose="batch")
        listed = (await http.get(FILES)).json()
        assert [it["id"] for it in listed["data"]] == [other.id, made["id"]]
        page = (await http.get(FILES, params={"limit": 1, "order": "asc"})).json()
        assert ([it["id"] for it in page["data"]], page["has_more"]) == ([made["id"]], True)
        for request in (foreign.get(url), foreign.get(f"{url}/content"), foreign.delete(url)):
            assert (await request).status_code == 404
        assert (await http.delete(url)).json() == {
            "id": made["id"],
            "object": "file",
            "deleted": True,
        }
        assert (await http.get(f"{url}/content")).status_code == 404
        for wrong, param in (
            ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
            ({"data": {"purpose": "batch", "z": "1"}, "files": {"file": b"x"}}, "z"),
            ({"files": {"file": b"x"}}, "purpose"),
            ({"json": {}}, "file"),
        ):
            refused = await http.post(FILES, **wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        monkeypatch.setattr("gateway.files.routes.FILE_BYTES_MAX", 1000)
        monkeypatch.setattr(files, "FILE_BYTES_MAX", 1000)
        refused = await http.post(FILES, data={"purpose": "batch"}, files={"file": b"x" * 2000})
        assert refused.status_code == 413
        assert len((await http.get(FILES)).json()["data"]) == 1, "nothing is left of it"


async def test_a_batch_of_each_endpoint(batching: Any) -> None:
    async with batching() as w, w.http() as http:
        bodies = {
            CHAT: {},
            "/v1/completions": {"prompt": "x"},
            "/v1/responses": {"input": "x", "store": False},
        }
        for url, body in bodies.items():
            one = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "tiny"} | body}
            if url == CHAT:
                one = line("a")
            batch = await begun(http, [one], url)
            assert (batch["status"], batch["object"]) == ("validating", "batch")
            done = await until(w, http, batch["id"], *ENDED)
            assert done["status"] == "completed", done
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            (answer,) = await content(http, done["output_file_id"])
            assert (answer["custom_id"], answer["error"]) == ("a", None)
            assert answer["response"]["status_code"] == 200
            told = json.dumps(answer["response"]["body"], ensure_ascii=False)
            assert w.text[:10] in told
        submit = w.router.submits[-1]
        assert submit.is_preemptible


async def test_good_and_bad_lines_go_into_two_files(batching: Any) -> None:
    async with batching() as w, w.http() as http:
        lines = [line(f"good {number}") for number in range(5)]
        lines += [line("bad", temperature=9), line("none", model="none")]
        batch = await begun(http, lines)
        done = await until(w, http, batch["id"], *ENDED)
        assert done["request_counts"] == {"total": 7, "completed": 5, "failed": 2}
        good = await content(http, done["output_file_id"])
        assert [it["custom_id"] for it in good] == [f"good {number}" for number in range(5)]
        bad = await content(http, done["error_file_id"])
        codes = {it["custom_id"]: it["response"]["status_code"] for it in bad}
        assert codes == {"bad": 400, "none": 404}
        assert bad[0]["response"]["body"]["error"]["param"] == "temperature"


async def test_a_file_that_is_no_batch(batching: Any) -> None:
    async with batching() as w, w.http() as http:
        lines = [
            line("a"),
            line("a"),
            line("b", url="/v1/other"),
            {"z": 1},
            [1],
            line("c", stream=True),
        ]
        batch = await begun(http, lines)
        failed = await until(w, http, batch["id"], *ENDED)
        assert failed["status"] == "failed"
        told = [(it["line"], it["code"]) for it in failed["errors"]["data"]]
        assert told == [
            (2, "duplicate_custom_id"),
            (3, "mismatched_url"),
            (4, "invalid_request"),
            (5, "invalid_json_line"),
            (6, "invalid_request"),
        ]
        assert not w.router.submits
        empty = await begun(http, [])
        assert (await until(w, http, empty["id"], *ENDED))["status"] == "failed"
        for wrong, param in (
            ({"completion_window": "1h"}, "completion_window"),
            ({"endpoint": "/v1/x"}, "endpoint"),
            ({"z": 1}, "z"),
        ):
            body = {"input_file_id": "file_1", "endpoint": CHAT, "completion_window": "24h"} | wrong
            refused = await http.post(BATCHES, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        body = {"input_file_id": "file_1", "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post(BATCHES, json=body)).status_code == 404


async def test_cancelled_and_expired(batching: Any, database: Database) -> None:
    async with batching() as w, w.http() as http, w.http(OTHER_KEY) as foreign:
        w.router.plan = lambda _: Plan([[65]] * 1_000_000, None)
        for status in ("cancelled", "expired"):
            batch = await begun(http, [line("a"), line("b")])
            url = f"{BATCHES}/{batch['id']}"
            await until(w, http, batch["id"], "in_progress")
            async with asyncio.timeout(60):
                while len(w.router.submits) < 2:  # noqa: ASYNC110 - the router tells no event
                    await asyncio.sleep(0.05)
            assert (await foreign.post(f"{url}/cancel")).status_code == 404
            assert (await foreign.get(url)).status_code == 404
            if status == "cancelled":
                cancelling = (await http.post(f"{url}/cancel")).json()
                assert cancelling["status"] == "cancelling"
            else:
                await database.run(
                    lambda connection: connection.execute(
                        text(
                            "UPDATE batches SET expires_at_unix_ms = 1 WHERE status = 'in_progress'"
                        )
                    ),
                    deadline_s=5,
                )
            done = await until(w, http, batch["id"], *ENDED)
            assert (done["status"], done["output_file_id"]) == (status, None)
            left = await content(http, done["error_file_id"])
            assert {it["error"]["code"] for it in left} == {f"batch_{status}"}
            async with asyncio.timeout(60):
                while w.gateway.stateful.lines.open:  # noqa: ASYNC110 - it tells no event
                    await asyncio.sleep(0.05)
            assert (await http.post(f"{url}/cancel")).status_code == (
                200 if status == "cancelled" else 409
            )
            w.router.submits.clear()
        listed = (await http.get(BATCHES)).json()
        assert [it["status"] for it in listed["data"]] == ["expired", "cancelled"]


async def test_no_line_is_recorded_twice_and_none_is_lost(
    batching: Any, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway dies with lines under way, and a control plane while it writes the files."""
    monkeypatch.setattr("control_plane.batches.repository.LEASE_MS", 300)
    async with batching() as w, w.http() as http:
        w.router.plan = lambda _: Plan([[65]] * 1_000_000, None)
        batch = await begun(http, [line(str(number)) for number in range(20)])
        await until(w, http, batch["id"], "in_progress")
        lines = w.gateway.stateful.lines
        async with asyncio.timeout(60):
            while not w.router.submits:  # noqa: ASYNC110 - the router tells no event
                await asyncio.sleep(0.05)
        for task in list(lines._running.values()):  # the gateway dies: nothing is told of them
            task.cancel()
        await asyncio.sleep(0)
        lines._returned.clear()
        w.router.plan = w.default_plan
        step = w.loop._move

        async def dies(*_: Any, **__: Any) -> None:
            w.loop._move = step
            raise TimeoutError

        async with asyncio.timeout(60):
            while True:
                counts = (await http.get(f"{BATCHES}/{batch['id']}")).json()["request_counts"]
                if counts["completed"] == 20:
                    break
                await asyncio.sleep(0.1)
        w.loop._move = dies
        with pytest.raises(TimeoutError):
            await w.loop.step()
        done = await until(w, http, batch["id"], *ENDED)
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        answers = await content(http, done["output_file_id"])
        assert [it["custom_id"] for it in answers] == [str(number) for number in range(20)]
        assert len((await http.get(FILES)).json()["data"]) == 2, "one file in, one file out"


async def test_a_line_waits_for_room(batching: Any) -> None:
    async with batching() as w, w.http() as http:
        refusals = [3]

        def plan(submit: wire.Submit) -> Plan:
            if refusals[0]:
                refusals[0] -= 1
                return Plan(
                    [], wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="tenant_queue_full")
                )
            return w.default_plan(submit)

        w.router.plan = plan
        batch = await begun(http, [line(str(number)) for number in range(6)])
        done = await until(w, http, batch["id"], *ENDED)
        assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


async def test_a_form_that_is_broken_or_does_not_come_says_how_to_send_it(
    batching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    file = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    async with batching() as w, w.http() as http:
        broken = await http.post(FILES, content=b"no boundary", headers=kind)
        assert broken.status_code == 400
        assert "-F purpose=batch -F file=@" in broken.json()["error"]["message"]
        monkeypatch.setattr("gateway.files.routes._PIECE_S", 0.2)
        for sent in (b"--x\r\n", begin, begin + file):
            head = f"POST {FILES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: {kind['Content-Type']}\r\nContent-Length: 100000\r\n\r\n"
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(head.encode() + sent)
            async with asyncio.timeout(60):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b"no further byte for 0.2 s. Send it again" in answer
            writer.close()
            await writer.wait_closed()


async def test_routes_need_a_key(batching: Any) -> None:
    async with batching() as w, httpx.AsyncClient(base_url=w.base_url) as http:
        assert KEY
        for method, path in (
            ("POST", FILES), ("GET", FILES), ("GET", f"{FILES}/x"), ("DELETE", f"{FILES}/x"),
            ("POST", BATCHES), ("GET", BATCHES), ("GET", f"{BATCHES}/x"), ("POST", f"{BATCHES}/x/cancel"),
        ):  # fmt: skip
            assert (await http.request(method, path)).status_code == 401
