"""What is counted and charged, and what is told of it: by the answer, not by how it came."""

import json
import shutil

import openai
import pytest

from sluice.artifacts import import_directory
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
LIMITED = "sk-limited"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def failing(code: str, kind: int = wire.OUTCOME_KIND_FAILED, param: str = "") -> Plan:
    return Plan([[]], wire.Outcome(kind=kind, code=code, message="it is none", param=param))


def let_it_reason(w, home) -> None:
    """Give the model a base whose template thinks if it is told to."""
    root = w.settings.artifacts_dir
    shutil.copytree(root / w.digest.removeprefix("sha256:"), home / "base")
    (home / "base/chat_template.jinja").unlink(missing_ok=True)
    file = home / "base/tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] += "{% if enable_thinking %}{% endif %}{# <think> #}"
    file.write_text(json.dumps(config))
    digest = import_directory(home / "base", root)
    objects = control.Objects()
    objects.CopyFrom(w.feed.objects)
    for it in (*objects.models, *objects.pools):
        it.base_digest = digest
    objects.bases.add(digest=digest, context_tokens_max=256)
    w.feed.replace(objects)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_behind_a_stop_are_not_charged(world, size: int, is_stream: bool) -> None:
    async with world() as w, w.http() as http:
        ids = w.ids("one two STOP three four five six seven")
        w.router.plan = lambda _: Plan([ids[i : i + size] for i in range(0, len(ids), size)])
        body = {"model": "tiny", "messages": HELLO, "stop": "STOP"}
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = (await http.post(CHAT, json=body)).text
        usage = json.loads(answer.split("data: ")[-2] if is_stream else answer)["usage"]
        assert usage["completion_tokens"] == next(
            count for count in range(len(ids)) if "STOP" in w.tokenizer.decode(ids[:count])
        )


async def test_reasoning_is_told_apart_in_usage(world, tmp_path, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=HELLO)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        text = await sdk.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert text.usage.completion_tokens_details.reasoning_tokens == 0
        let_it_reason(w, tmp_path)
        await eventually(lambda: w.gateway.watcher.state.models["tiny"].base_digest != w.digest)
        thought, said = w.ids("<think>\nwhy not\n</think>"), w.ids("so be it")
        for size in (1, 100):
            steps = [*thought, *said]
            w.router.plan = lambda _, size=size, steps=steps: Plan(
                [steps[i : i + size] for i in range(0, len(steps), size)]
            )
            answer = await sdk.chat.completions.create(model="tiny", messages=HELLO)
            assert answer.choices[0].message.reasoning_content == "why not\n"
            assert answer.choices[0].message.content == "so be it"
            assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)
            assert answer.usage.completion_tokens == len(steps)
            stream = await sdk.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            usage = [chunk.usage async for chunk in stream][-1]
            assert usage.completion_tokens_details.reasoning_tokens == len(thought)


async def test_how_much_reasoning_is_heeded_or_refused(world, tmp_path, eventually) -> None:
    async with world() as w, w.sdk() as sdk:

        async def ask(effort: str) -> object:
            return await sdk.chat.completions.create(
                model="tiny", messages=HELLO, reasoning_effort=effort, max_tokens=3
            )

        with pytest.raises(openai.BadRequestError) as caught:
            await ask("high")
        assert (caught.value.code, caught.value.param) == (
            "unsupported_parameter",
            "reasoning_effort",
        )
        assert not w.router.submits
        await ask("none")
        let_it_reason(w, tmp_path)
        await eventually(lambda: w.gateway.watcher.state.models["tiny"].base_digest != w.digest)
        await ask("high")
        await ask("none")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_of_an_enforced_call_that_is_cut_no_mark_is_shown(world, is_stream: bool) -> None:
    async with world() as w, w.http() as http:
        ids = w.ids(CALL)
        body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
        for count in range(1, len(ids)):
            w.router.plan = lambda _, count=count: Plan([[token] for token in ids[:count]])
            answer = (await http.post(CHAT, json=body | {"stream": is_stream})).text
            if is_stream:
                events = [json.loads(it) for it in answer.split("data: ")[1:-1]]
                choices = [event["choices"][0] for event in events]
                assert not any(choice["delta"].get("content") for choice in choices)
                assert choices[-1]["finish_reason"] == "length"
            else:
                choice = json.loads(answer)["choices"][0]
                assert choice["message"]["content"] is None
                assert choice["finish_reason"] == "length"
                for call in choice["message"].get("tool_calls", ()):
                    assert call["function"]["name"] == "f"


async def test_a_grammar_that_is_none_costs_its_request_and_nothing_else(world) -> None:
    async with world() as w, w.http(LIMITED) as http:
        w.router.plan = lambda _: failing("invalid_request", param="grammar")
        body = {"model": "tiny", "messages": HELLO, "regex": "[0-9", "max_tokens": 5}
        for _ in range(100):
            response = await http.post(CHAT, json=body)
            if response.status_code == 429:
                break
            assert (response.status_code, response.json()["error"]["param"]) == (400, "regex")
            assert response.headers["x-ratelimit-limit-requests"] == "5"
        assert response.json()["error"]["code"] == "rate_limit_requests"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > 800


async def test_a_deadline_of_the_callers_own_is_not_tried_again(world) -> None:
    async with world() as w:
        w.router.plan = lambda _: failing("deadline_exceeded", wire.OUTCOME_KIND_EVICTED)
        sdk = openai.AsyncOpenAI(base_url=f"{w.base_url}/v1", api_key="sk-one", max_retries=2)
        async with sdk:

            async def ask(**extra: object) -> openai.InternalServerError:
                w.router.submits.clear()
                with pytest.raises(openai.InternalServerError) as caught:
                    await sdk.chat.completions.create(
                        model="tiny", messages=HELLO, max_tokens=3, extra_body=extra
                    )
                return caught.value

            error = await ask(deadline_ms=7)
            assert (error.status_code, error.code) == (503, "deadline_exceeded")
            assert "7 ms" in error.message
            assert error.response.headers["x-should-retry"] == "false"
            assert len(w.router.submits) == 1
            error = await ask()
            assert "x-should-retry" not in error.response.headers
            assert len(w.router.submits) == 3
