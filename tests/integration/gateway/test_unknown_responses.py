"""An id of another tenant is answered like an unknown one: by the same work, with the same text.

Times are not compared. The same work is what makes them equal on any machine.
"""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.responses.background_log import BackgroundLog
from gateway.responses.durable import Durable
from gateway.responses.hot_store import HotStore
from gateway.responses.store import ResponseStore
from sluice.response_ids import new_response_id
from sluice.shared_secret import SharedSecret
from tests.integration.gateway.conftest import OTHER_KEY

pytestmark = pytest.mark.real

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello"}
LOOKUPS = (
    (ResponseStore, "_look"),
    (HotStore, "find"),
    (HotStore, "delete"),
    (BackgroundLog, "events"),
    (BackgroundLog, "cancel"),
    (Durable, "read"),
    (Durable, "delete"),
)
ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "get": lambda it: {"method": "GET", "url": f"{PATH}/{it}"},
    "stream": lambda it: {
        "method": "GET",
        "url": f"{PATH}/{it}",
        "params": {"stream": "true", "starting_after": 3},
    },
    "input_items": lambda it: {"method": "GET", "url": f"{PATH}/{it}/input_items"},
    "cancel": lambda it: {"method": "POST", "url": f"{PATH}/{it}/cancel"},
    "delete": lambda it: {"method": "DELETE", "url": f"{PATH}/{it}"},
    "continue": lambda it: {
        "method": "POST",
        "url": PATH,
        "json": BODY | {"previous_response_id": it},
    },
    "input_tokens": lambda it: {
        "method": "POST",
        "url": f"{PATH}/input_tokens",
        "json": BODY | {"previous_response_id": it},
    },
    "compact": lambda it: {
        "method": "POST",
        "url": f"{PATH}/compact",
        "json": {"model": "tiny", "previous_response_id": it},
    },
}


@pytest.fixture(name="work")
def work_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the calls that look for a response in memory, in Valkey and in PostgreSQL."""
    calls: list[str] = []

    def watch(owner: type, name: str) -> None:
        called = getattr(owner, name)

        async def noted(*args: Any, **options: Any) -> Any:
            calls.append(f"{owner.__name__}.{name}")
            return await called(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in LOOKUPS:
        watch(owner, name)
    return calls


async def answer_and_work(
    http: httpx.AsyncClient, work: list[str], response_id: str, call: dict[str, Any]
) -> tuple[Any, ...]:
    """Return what a client gets and what the gateway did for it, without the id itself."""
    work.clear()
    answer = await http.request(**call)
    told = answer.text.replace(response_id, "ID")
    return answer.status_code, told, tuple(sorted(answer.headers)), tuple(work)


def ids_without_a_response(foreign: str) -> dict[str, str]:
    """Return ids that no response of the caller has."""
    other = "0" if foreign[-1] != "0" else "1"
    return {
        "foreign": foreign,
        "foreign and missing": new_response_id("one", SharedSecret(["x" * 32])),
        "forged": foreign[:-1] + other,
    }


@pytest.mark.parametrize("route", ROUTES)
async def test_foreign_and_forged_ids_cost_the_same_work_on_every_route(
    stateful: Any, work: list[str], route: str
) -> None:
    async with stateful() as w, w.http() as http, w.http(OTHER_KEY) as caller:
        made = [(await http.post(PATH, json=BODY)).json()["id"] for _ in range(2)]
        call = ROUTES[route]
        told = {
            kind: await answer_and_work(caller, work, it, call(it))
            for kind, it in ids_without_a_response(made[0]).items()
        }
        assert len(set(told.values())) == 1, told
        status, _, _, done = told["foreign"]
        assert (status, done) == (404, ())
        own = await answer_and_work(http, work, made[1], call(made[1]))
        assert own[3], "the work of an existing response is seen"


async def test_items_of_others_cost_the_work_of_missing_ones(
    stateful: Any, work: list[str]
) -> None:
    async with stateful() as w, w.http() as http, w.http(OTHER_KEY) as caller:
        made = (await http.post(PATH, json=BODY)).json()
        foreign = made["output"][0]["id"]
        missing = new_response_id("two", SharedSecret(["x" * 32]))[5:31]
        told = set()
        for item_id in (foreign, f"msg_{missing}00"):
            call = {"json": BODY | {"input": [{"type": "item_reference", "id": item_id}]}}
            told.add(
                await answer_and_work(
                    caller, work, item_id, {"method": "POST", "url": PATH, **call}
                )
            )
        assert len(told) == 1, told
        assert {(it[0], bool(it[3])) for it in told} == {(404, True)}
