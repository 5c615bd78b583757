"""Chats that have outgrown their context: turns give way, and clients and operators are told."""

from typing import Any

import pytest

from gateway.endpoints.response_answers import ResponseObject
from tests.support.response_shapes import events_of

pytestmark = pytest.mark.real


def chat(turns: int) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]
    for number in range(turns):
        said += [
            {"role": "user", "content": f"what is {number}, and what comes behind it?"},
            {"role": "assistant", "content": f"it is {number}, and then {number + 1}."},
        ]
    return [*said, {"role": "user", "content": "and now?"}]


async def test_oldest_turns_give_way_and_it_is_told(world: Any) -> None:
    short, long = {"model": "tiny", "input": chat(1)}, {"model": "tiny", "input": chat(40)}
    async with world() as w, w.http() as http:
        refused = await http.post("/v1/responses", json=long)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        whole = await http.post("/v1/responses", json=long | {"truncation": "auto"})
        assert whole.status_code == 200, whole.text
        dropped = int(whole.headers["x-sluice-dropped-turns"])
        assert 0 < dropped < 40
        assert ResponseObject.model_validate(whole.json()).dropped_turns == dropped
        assert whole.json()["truncation"] == "auto"
        assert len(w.router.submits[-1].prompt) <= 256 - 256 // 8
        prompt = list(w.router.submits[-1].prompt)
        streamed = await http.post(
            "/v1/responses", json=long | {"truncation": "auto", "stream": True}
        )
        assert streamed.headers["x-sluice-dropped-turns"] == str(dropped)
        assert events_of(streamed.text)[-1]["response"]["dropped_turns"] == dropped
        chatted = await http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": chat(40), "truncation": "auto"},
        )
        assert chatted.headers["x-sluice-dropped-turns"] == str(dropped)
        assert list(w.router.submits[-1].prompt) == prompt
        fits = await http.post("/v1/responses", json=short | {"truncation": "auto"})
        assert "x-sluice-dropped-turns" not in fits.headers
        assert "dropped_turns" not in fits.json()
        last_alone = await http.post(
            "/v1/responses",
            json={"model": "tiny", "input": "hello " * 400, "truncation": "auto"},
        )
        assert last_alone.json()["error"]["code"] == "context_length_exceeded"
