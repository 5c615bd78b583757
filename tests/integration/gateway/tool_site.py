"""A gateway's world with tools that it runs: HTTP addresses and a server of MCP."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.endpoints.response_answers import ResponseObject
from sluice.sealing import Sealer
from sluice.server_tools import SEALED_FOR, header_place
from sluice.shared_secret import ours
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.response_shapes import events_of
from tests.support.scripted_router import Plan
from tests.support.tool_servers import HttpTools, McpServer, serving_http, serving_mcp

PATH = "/v1/responses"
STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)
TOKEN = "Bearer very-secret"
WEATHER: Any = {"type": "function", "name": "weather", "server": True}
DOCS: Any = {"type": "mcp", "server_label": "docs", "require_approval": "never"}
MINE: Any = {"type": "function", "name": "mine", "parameters": {"type": "object"}}


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


BERN = call("weather", city="Bern")


class ToolWorld:
    """A gateway's world with tools of its tenant."""

    def __init__(self, w: Any, http: HttpTools, mcp: McpServer, eventually: Any) -> None:
        self.w, self.http, self.mcp = w, http, mcp
        self._eventually = eventually

    def says(self, *texts: str) -> None:
        """Let the model answer so, one after the other; the last one again and again."""
        left = list(texts)

        def plan(submit: wire.Submit) -> Plan:
            text = left.pop(0) if len(left) > 1 else left[0]
            ids = self.w.ids(text)
            cut = ids[: submit.output_tokens_max]
            kind = wire.OUTCOME_KIND_STOP if cut == ids else wire.OUTCOME_KIND_LENGTH
            return Plan([[token] for token in cut], wire.Outcome(kind=kind))

        self.w.router.plan = plan
        self.w.router.submits.clear()

    def prompt(self, number: int = -1) -> str:
        ids = list(self.w.router.submits[number].prompt)
        return self.w.tokenizer.decode(ids, skip_special_tokens=False)

    async def register(self, **tool: Any) -> None:
        objects = self.w.feed.objects
        objects.server_tools.add(**{"owner_tenant_id": "one", **_DEFAULTS, **tool})
        self.w.feed.replace(objects)
        known = self.w.gateway.watcher.state.server_tools
        await self._eventually(lambda: tool["id"] in self.w.gateway.watcher.state.server_tools)
        del known

    async def until(self, check: Callable[[], bool]) -> None:
        await self._eventually(check)

    async def whole(self, **body: Any) -> dict[str, Any]:
        async with self.w.http() as http:
            asked = {"model": "tiny", "input": "hello", "store": False, **body}
            answer = await http.post(PATH, json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("application/json")
            ResponseObject.model_validate(answer.json())
            return answer.json()

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        async with self.w.http() as http:
            asked = {"model": "tiny", "input": "hello", "store": False, "stream": True, **body}
            answer = await http.post(PATH, json=asked)
            assert answer.status_code == 200, answer.text
            return events_of(answer.text)

    async def refused(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.w.http() as http:
            answer = await http.post(PATH, json={"model": "tiny", "input": "hello", **body})
            return answer.status_code, answer.json()["error"]


_DEFAULTS: dict[str, Any] = {
    "kind": "http",
    "method": "POST",
    "timeout_ms": 5000,
    "result_bytes_max": 4096,
    "approval": "never",
}
Tools = Callable[..., Any]


@pytest.fixture
def tools(world: Any, eventually: Any) -> Tools:
    @asynccontextmanager
    async def start(make: Any = world, **settings: Any) -> AsyncGenerator[ToolWorld]:
        http, mcp = HttpTools(), McpServer(token=TOKEN)
        async with serving_http(http) as address, serving_mcp(mcp) as url:
            hosts = f"{address},{url.split('/')[2]}"
            async with make(tool_hosts=hosts, **settings) as w:
                objects = w.feed.objects
                objects.bases[0].context_tokens_max = 100_000
                w.feed.replace(objects)
                made = ToolWorld(w, http, mcp, eventually)
                await made.register(id="t1", name="weather", url=f"http://{address}/weather")
                place = header_place("t2", url, "Authorization")
                sealed = {"Authorization": Sealer(ours(), SEALED_FOR).seal(TOKEN, place)}
                await made.register(
                    id="t2", kind="mcp", name="docs", url=url, secret_headers=sealed
                )
                for name in ("huge", "silent", "page", "redirect"):
                    await made.register(
                        id=name, name=name, url=f"http://{address}/{name}", timeout_ms=400
                    )
                yield made

    return start


def kinds(items: Sequence[dict[str, Any]]) -> list[str]:
    return [it["type"] for it in items]


def unnamed(response: dict[str, Any]) -> dict[str, Any]:
    own = {"id": "", "created_at": 0, "completed_at": bool(response["completed_at"])}
    return response | own | {"output": [item | {"id": ""} for item in response["output"]]}
