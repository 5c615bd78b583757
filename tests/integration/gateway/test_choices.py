"""Several answers, log probabilities, text completions, signs of life, models that stand in."""

import asyncio
import json

import openai
import pytest

from gateway.endpoints.submission import derived_seed
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def number_of(submit: wire.Submit) -> int:
    """Which answer of its request this is."""
    _, _, number = submit.request_id.partition("-")
    return int(number or 0)


async def test_several_answers_share_a_prompt_and_have_their_own_seeds(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda s: Plan([[t] for t in w.ids(f"answer {number_of(s)}")])
        answer = await sdk.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert [c.message.content for c in answer.choices] == ["answer 0", "answer 1", "answer 2"]
        assert answer.usage.prompt_tokens == len(w.router.submits[0].prompt)
        assert answer.usage.completion_tokens == sum(len(w.ids(f"answer {i}")) for i in range(3))
        assert [s.sampling.seed for s in w.router.submits] == [
            7,
            derived_seed(7, 1),
            derived_seed(7, 2),
        ]
        assert [s.is_begun for s in w.router.submits] == [False, True, True]
        assert len({s.request_id for s in w.router.submits}) == 3


async def test_the_others_are_asked_for_when_the_first_has_begun(world, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda s: Plan([[]] * 50 + [[t] for t in w.ids("x")], cached_tokens=5)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(sdk.chat.completions.create(model="tiny", messages=HELLO, n=4))
            await eventually(lambda: w.router.submits)
            await asyncio.sleep(0.02)
            assert len(w.router.submits) == 1
        assert len(call.result().choices) == 4
        assert call.result().usage.prompt_tokens_details.cached_tokens == 5


async def test_streamed_answers_are_told_apart_by_their_index(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda s: Plan([[t] for t in w.ids(f"answer number {number_of(s)}")])
        stream = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
        )
        texts, reasons, roles, usages = ["", "", ""], {}, set(), []
        async for chunk in stream:
            usages.append(chunk.usage)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.delta.role:
                    roles.add(choice.index)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == [f"answer number {i}" for i in range(3)]
        assert (roles, reasons) == ({0, 1, 2}, dict.fromkeys(range(3), "length"))
        assert usages[-1].completion_tokens == sum(len(w.ids(text)) for text in texts)


async def test_a_lost_answer_among_several_goes_on(world) -> None:
    async with world() as w, w.sdk() as sdk:
        lost = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost")

        def plan(submit: wire.Submit) -> Plan:
            ids = w.ids(f"answer number {number_of(submit)}")[submit.resumed_tokens :]
            if number_of(submit) == 1 and not submit.resumed_tokens:
                return Plan([[t] for t in ids[:3]], lost)
            return Plan([[t] for t in ids])

        w.router.plan = plan
        for is_stream in (False, True):
            answer = await sdk.chat.completions.create(
                model="tiny", messages=HELLO, n=3, stream=is_stream, logprobs=True
            )
            texts, entries = ["", "", ""], [[], [], []]
            if is_stream:
                async for chunk in answer:
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
                        if choice.logprobs:
                            entries[choice.index] += choice.logprobs.content
            else:
                for choice in answer.choices:
                    texts[choice.index] = choice.message.content
                    entries[choice.index] = choice.logprobs.content
            assert texts == [f"answer number {i}" for i in range(3)]
            for text, told in zip(texts, entries, strict=True):
                assert [-round(e.logprob * 1000) for e in told] == w.ids(text)


async def test_one_refused_answer_refuses_the_request(world, eventually) -> None:
    refused = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="engine_failed", message="no")
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda s: (
            Plan([[40]] * 1000, None) if number_of(s) == 0 else Plan([], refused)
        )
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(model="tiny", messages=HELLO, n=2)
        assert caught.value.code == "engine_failed"
        await eventually(lambda: w.router.cancelled)
        await eventually(lambda: w.gateway.dispatcher.open == 0)
        stream = await sdk.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True)
        with pytest.raises(openai.APIError) as in_band:
            async for _ in stream:
                pass
        assert in_band.value.code == "engine_failed"


async def test_log_probabilities_of_a_chat(world) -> None:
    async with world() as w, w.sdk() as sdk:
        answer = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content
        ids = w.ids(w.text)
        assert [-round(entry.logprob * 1000) for entry in content] == ids, "without the end token"
        assert b"".join(bytes(entry.bytes) for entry in content).decode() == w.text
        assert all(len(entry.top_logprobs) == 2 for entry in content)
        assert content[0].top_logprobs[0].token == content[0].token
        stream = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, stream=True, stop=["owns"]
        )
        text, told = "", []
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                told += choice.logprobs.content if choice.logprobs else []
        assert text == w.text[: w.text.index("owns")]
        told_text = b"".join(bytes(entry.bytes) for entry in told).decode()
        assert told_text.startswith(text), "what the stop string cut off is not told"
        assert len(told_text) - len(text) < 5
        plain = await sdk.chat.completions.create(model="tiny", messages=HELLO)
        assert plain.choices[0].logprobs is None


async def test_text_completions(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda s: Plan([[t] for t in w.ids(f" {number_of(s)}")])
        answer = await sdk.completions.create(
            model="tiny", prompt=["one", "two"], n=2, echo=True, max_tokens=9
        )
        assert answer.object == "text_completion"
        assert [c.text for c in answer.choices] == ["one 0", "one 1", "two 2", "two 3"]
        prompts = [w.tokenizer.decode(list(s.prompt)) for s in w.router.submits]
        assert sorted(prompts) == ["one", "one", "two", "two"]
        assert answer.usage.prompt_tokens == len(w.ids("one")) + len(w.ids("two"))
        ids = await sdk.completions.create(model="tiny", prompt=w.ids("raw"), logprobs=2)
        assert list(w.router.submits[-1].prompt) == w.ids("raw")
        told = ids.choices[0].logprobs
        assert "".join(told.tokens) == ids.choices[0].text
        assert told.text_offset[0] == 0
        assert [len(top) for top in told.top_logprobs] == [2] * len(told.tokens)
        stream = await sdk.completions.create(model="tiny", prompt="one", stream=True, echo=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == "one 0"
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_sampling_reaches_the_engine(world) -> None:
    async with world() as w, w.sdk() as sdk:
        await sdk.chat.completions.create(
            model="tiny",
            messages=HELLO,
            temperature=0.5,
            top_p=0,
            presence_penalty=0.5,
            frequency_penalty=-1,
            logit_bias={"5": -100, "6": 2},
            extra_body={"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3},
            response_format={"type": "json_object"},
        )
        sampling = w.router.submits[0].sampling
        assert (sampling.temperature, sampling.presence_penalty) == (0.5, 0.5)
        assert 0 < sampling.top_p < 0.01, "0 would switch it off"
        assert sampling.frequency_penalty == -1
        assert dict(zip(sampling.bias_token, sampling.logit_bias, strict=True)) == {5: -100, 6: 2}
        assert sampling.min_p == pytest.approx(0.1)
        assert sampling.tokens_min == 3
        assert sampling.grammar.kind == sampling.grammar.KIND_JSON


async def test_a_silent_stream_shows_that_it_lives(world) -> None:
    async with world(keep_alive_s=0.1) as w:
        first = w.ids("x")[0]
        w.router.plan = lambda _: Plan([[]] * 200 + [[first]] + [[]] * 200 + [[first]])
        reader, writer = await w.raw({"model": "tiny", "messages": HELLO, "stream": True})
        body = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 60)
        writer.close()
        before, _, after = body.partition(b'"content":"x"')
        assert b"HTTP/1.1 200" in before
        assert before.count(b": keep-alive\n\n") >= 1
        assert after.count(b": keep-alive\n\n") >= 1
        assert after.count(b'"content":"x"') == 1


async def test_a_failure_after_a_sign_of_life_is_told_in_band(world) -> None:
    refused = wire.Outcome(
        kind=wire.OUTCOME_KIND_FAILED, code="invalid_request", message="no", param="grammar"
    )
    async with world(keep_alive_s=0.05) as w, w.http() as http:
        w.router.plan = lambda _: Plan([[]] * 200, refused)
        body = {"model": "tiny", "messages": HELLO, "stream": True, "regex": "a"}
        response = await http.post(CHAT, json=body)
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "regex")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_another_model_stands_in_for_one_that_is_down(world, is_stream: bool) -> None:
    async with world() as w, w.http() as http:
        body = {"model": "nowhere", "messages": HELLO, "stream": is_stream}
        alone = await http.post(CHAT, json=body)
        assert alone.status_code == 503
        objects = w.feed.objects
        for tenant in objects.tenants:
            if tenant.id == "one":
                tenant.fallbacks["nowhere"] = "tiny"
        w.feed.replace(objects)
        async with asyncio.timeout(60):
            while (response := await http.post(CHAT, json=body)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert response.headers["x-sluice-model"] == "tiny"
        text = response.text
        document = json.loads(text.split("\n\n")[0].removeprefix("data: ") if is_stream else text)
        assert document["model"] == "tiny"
        assert b"gateway_fallbacks_total 1.0" in w.gateway.metrics.page()


async def test_a_model_that_stands_in_and_is_down_as_well_changes_nothing(
    world, eventually
) -> None:
    async with world() as w, w.http() as http:
        objects = w.feed.objects
        objects.models.append(control.Model(id="down", base_digest=w.digest, pool_id="none"))
        for tenant in objects.tenants:
            tenant.fallbacks["*"] = "down"
        w.feed.replace(objects)
        await eventually(lambda: "down" in w.gateway.watcher.state.models)
        response = await http.post(CHAT, json={"model": "nowhere", "messages": HELLO})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")


class Lagging:
    is_lagging = True


@pytest.mark.parametrize("tokens", [3, 4])  # one of them leaves a token held at the end
async def test_nothing_follows_the_end_of_a_stream_that_fails(world, tokens: int) -> None:
    """What a lagging worker still holds must not end up in front of the next response."""
    refused = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="engine_failed", message="no")
    async with world() as w:
        w.gateway.pace._lag = Lagging()
        w.router.plan = lambda _: Plan([[t] for t in w.ids(w.text)[:tokens]], refused)
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        reader, writer = await w.raw(body)
        first = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
        events = [line[6:] for line in first.split(b"\n") if line.startswith(b"data: ")]
        chunks = [json.loads(event) for event in events]
        text = "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1])
        told = w.tokenizer.decode(w.ids(w.text)[:tokens])
        assert (text, chunks[-1]["error"]["code"]) == (told, "engine_failed")
        await asyncio.sleep(0.1)  # more than a token is held
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 401"), answer
