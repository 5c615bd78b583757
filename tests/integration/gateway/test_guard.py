"""Answers of tenants with rules: rewritten, ended and counted, in every dialect, whole and streamed."""

import json

import pytest

from sluice.wire.control.v1 import control_pb2 as control
from tests.support.scripted_router import Plan

from .conftest import KEY, OTHER_KEY

pytestmark = pytest.mark.real

RULES = [
    control.GuardRule(id="mail", action="rewrite", named="email", targets=["answer"]),
    control.GuardRule(
        id="word", action="block", words=["falcon"], targets=["prompt", "answer", "tool_results"]
    ),
]
SAID = "Write to user@example.com today"
SHOWN = "Write to [mail] today"
BLOCKED = "Its name is falcon, they say, and much more of this"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 99}
RESPONSE = {"model": "tiny", "input": "hi", "store": False}
MESSAGE = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 99}


async def _guarded(w, eventually, *, active: bool = True) -> None:
    objects = w.feed.objects
    del objects.guard_sets[:]
    version = 1 if active else 0
    objects.guard_sets.add(
        id="set",
        owner_tenant_id="one",
        version=1,
        rules=RULES,
        active_version=version,
        active_rules=RULES if active else [],
    )
    w.feed.replace(objects)
    sets = lambda: w.gateway.watcher.state.guard_sets  # noqa: E731
    await eventually(lambda: "set" in sets() and sets()["set"].active_version == version)


async def _events(http, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [it[6:] for it in answer.text.splitlines() if it.startswith("data: {")]
    return [json.loads(it) for it in lines]


def _all_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


async def test_answers_are_rewritten_in_every_dialect(world, eventually) -> None:
    async with world() as w:
        await _guarded(w, eventually)
        w.text = SAID
        async with w.http(KEY) as http:
            chat = (await http.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()
            assert [it["message"]["content"] for it in chat["choices"]] == [SHOWN] * 2
            text = (await http.post("/v1/completions", json=TEXT)).json()
            assert text["choices"][0]["text"] == SHOWN
            response = (await http.post("/v1/responses", json=RESPONSE)).json()
            assert response["output"][0]["content"][0]["text"] == SHOWN
            message = (await http.post("/v1/messages", json=MESSAGE)).json()
            assert message["content"] == [{"type": "text", "text": SHOWN}]
            chunks = await _events(http, "/v1/chat/completions", CHAT)
            pieces = [it["choices"][0]["delta"].get("content") or "" for it in chunks]
            assert "".join(pieces) == SHOWN
            assert len([it for it in pieces if it]) > 2  # it does stream
            parts = await _events(http, "/v1/messages", MESSAGE)
            said = [it["delta"].get("text", "") for it in parts if "delta" in it]
            assert "".join(said) == SHOWN
            done = (await _events(http, "/v1/responses", RESPONSE))[-1]["response"]
            assert done["output"][0]["content"][0]["text"] == SHOWN
            assert "example" not in _all_text([chunks, parts, done])
        async with w.http(OTHER_KEY) as http:  # of another tenant
            chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
            assert chat["choices"][0]["message"]["content"] == SAID


async def test_a_block_ends_the_answer_and_the_engine(world, eventually) -> None:
    async with world() as w:
        await _guarded(w, eventually)
        w.text = BLOCKED
        async with w.http(KEY) as http:
            chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
            [choice] = chat["choices"]
            assert choice["message"]["content"] == "Its name is "
            assert choice["finish_reason"] == "content_filter"
            assert chat["usage"]["completion_tokens"] < len(w.ids(BLOCKED))
            chunks = await _events(http, "/v1/chat/completions", CHAT)
            assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
            response = (await http.post("/v1/responses", json=RESPONSE)).json()
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "content_filter"}
            last = (await _events(http, "/v1/responses", RESPONSE))[-1]
            assert last["type"] == "response.incomplete"
            message = (await http.post("/v1/messages", json=MESSAGE)).json()
            assert message["stop_reason"] == "refusal"
            parts = await _events(http, "/v1/messages", MESSAGE)
            [stopped] = [it for it in parts if it["type"] == "message_delta"]
            assert stopped["delta"]["stop_reason"] == "refusal"
            assert "falc" not in _all_text([chat, chunks, response, last, message, parts])
            w.text = "Its name is falcon"  # the end of the text decides
            late = await _events(http, "/v1/chat/completions", CHAT)
            assert late[-1]["choices"][0]["finish_reason"] == "content_filter"
            assert "falc" not in _all_text(late)
            w.router.plan = lambda _: Plan([[it] for it in w.ids(BLOCKED)])  # it goes on
            await _events(http, "/v1/chat/completions", CHAT)
            await eventually(lambda: w.router.cancelled)
            tops = {**CHAT, "logprobs": True, "top_logprobs": 1}
            assert "falc" not in _all_text(await _events(http, "/v1/chat/completions", tops))


async def test_a_blocked_request_is_refused_before_any_queue(world, eventually) -> None:
    async with world() as w:
        await _guarded(w, eventually)
        tool = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "it is a falcon"},
        ]  # fmt: skip
        asked = {"role": "user", "content": "what is falcon?"}
        cases = [
            ("/v1/chat/completions", {**CHAT, "messages": [asked]}),
            ("/v1/chat/completions", {**CHAT, "messages": tool}),
            ("/v1/completions", {**TEXT, "prompt": w.ids("what is falcon?")}),
            ("/v1/responses", {**RESPONSE, "input": "what is falcon?"}),
            ("/v1/messages", {**MESSAGE, "messages": [asked]}),
        ]
        async with w.http(KEY) as http:
            for path, body in cases:
                answer = await http.post(path, json=body)
                assert answer.status_code == 400, (path, answer.text)
                assert "set/word" in answer.text
                if path != "/v1/messages":
                    assert answer.json()["error"]["code"] == "content_filter"
        assert not w.router.submits


async def test_rules_in_shadow_change_nothing_and_are_counted(world, eventually) -> None:
    async with world() as w:
        await _guarded(w, eventually, active=False)
        w.text = SAID + " falcon"
        async with w.http(KEY) as http:
            chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
        assert chat["choices"][0]["message"]["content"] == w.text
        assert chat["choices"][0]["finish_reason"] == "stop"
        await eventually(lambda: w.gateway.metrics.guard_matches.labels("shadow")._value.get() == 2)
        assert w.gateway.metrics.guard_matches.labels("acting")._value.get() == 0
