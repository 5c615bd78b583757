"""What `sluice golden add` makes of its options."""

import json

import httpx
import pytest
import typer

from cli.api import ApiClient
from cli.golden_commands import _seconds, _tokenized
from cli.golden_texts import PoolTexts, decode, readable_quarantine, readable_result, token_ids_of


def test_times_are_read_as_people_write_them() -> None:
    assert [_seconds(text) for text in ("45", "30s", "5m", "1h")] == [45, 30, 300, 3600]
    for text in ("", "5 m", "1d", "-3s", "1.5m"):
        with pytest.raises(typer.BadParameter):
            _seconds(text)


async def _ids(asked: dict, expect: str) -> tuple[list[int], list[int]]:
    """Ask a gateway whose tokens are words, except that `New York` is one."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        text = body.get("prompt") or "chat: " + body["messages"][0]["content"]
        words = text.replace("New York", "New_York").split()
        return httpx.Response(200, json={"tokens": [len(word) for word in words]})

    async with ApiClient("http://gateway/v1", "key") as gateway:
        gateway._http = httpx.AsyncClient(
            base_url="http://gateway/v1", transport=httpx.MockTransport(answer)
        )
        return await _tokenized(gateway, "m", asked, expect)


async def test_the_expected_text_is_tokenized_in_its_place() -> None:
    assert await _ids({"prompt": "one three"}, "") == ([3, 5], [])
    assert await _ids({"prompt": "one three"}, " seven x") == ([3, 5], [5, 1])
    # A token spans the place where the prompt ends: then the expected text stands alone.
    assert await _ids({"prompt": "in New"}, " York now") == ([2, 3], [4, 3])
    messages = [{"role": "user", "content": "hello"}]
    assert await _ids({"messages": messages}, "hi there") == ([5, 5], [2, 5])


RESULT = {"pool_id": "p", "token_ids": [1, 2], "right": [1, 3], "error": "", "differs_in": "tokens"}
QUARANTINE = {
    "id": "q",
    "pool_id": "p",
    "evidence": {
        "prompt": [9],
        "right": {"token_ids": [1, 3]},
        "answers": [
            {"token_ids": [1, 2], "differs_in": "tokens"},
            {"token_ids": None, "differs_in": None},
        ],
    },
}


def test_answers_are_shown_as_text_and_as_ids_where_it_is_not_known() -> None:
    texts = PoolTexts({("p", (1, 2)): "seven\nseven", ("p", (9,)): "x" * 500})
    shown = readable_result(RESULT, texts)
    assert (shown["answer"], shown["right"]) == ("'seven\\nseven'", "1 3")
    assert readable_result(RESULT | {"right": [1, 2]}, texts)["right"] == "same"
    assert readable_result(RESULT | {"error": "it hung"}, texts)["answer"] == "it hung"
    lines = readable_quarantine(QUARANTINE, texts)
    assert lines["answer 1"] == "tokens: 'seven\\nseven'"
    assert lines["answer 2"] == "right: -"
    assert len(lines["prompt"]) < 130
    assert "evidence" not in lines
    assert len(token_ids_of(QUARANTINE)) == 4


async def test_without_a_gateway_ids_are_shown(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    async with ApiClient("http://admin", "key") as admin:
        texts = await decode(admin, token_ids_of(QUARANTINE))
    assert texts.of("p", [1, 2]) == "1 2"
