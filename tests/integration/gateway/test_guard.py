"""Answers of tenants with rules: rewritten, ended and counted, in every dialect, whole and streamed."""

import json

import pytest

from sluice.events import EventProducer
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.support.scripted_router import Plan

from .conftest import KEY, OTHER_KEY

pytestmark = pytest.mark.real

RULES = [
    control.GuardRule(id="mail", action="rewrite", named="email", targets=["answer"]),
    control.GuardRule(
        id="word", action="block", words=["falcon"], targets=["prompt", "answer", "tool_results"]
    ),
]
STOPS = wire.OUTCOME_KIND_STOP
LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost", message="gone")
SAID = "Write to user@example.com today"
SHOWN = "Write to [mail] today"
BLOCKED = "Its name is falcon, they say, and much more of this"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 99}
RESPONSE = {"model": "tiny", "input": "hi", "store": False}
MESSAGE = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 99}


async def _guarded(w, eventually, *, active: bool = True, is_withheld_free: bool = False) -> None:
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
        is_withheld_free=is_withheld_free,
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


async def test_annotations_come_in_the_manner_of_azure_when_asked_for(
    world, eventually, guard_events
) -> None:
    async with world() as w:
        await _guarded(w, eventually)
        w.text = SAID
        async with w.sdk() as sdk:
            asked = {"x-sluice-filter-results": "true"}
            whole = await sdk.chat.completions.create(**CHAT, extra_headers=asked)
            found = whole.choices[0].model_extra["content_filter_results"]
            detail = {"id": "set/mail", "filtered": True}
            assert found == {"custom_blocklists": {"filtered": True, "details": [detail]}}
            clean = {"custom_blocklists": {"filtered": False, "details": []}}
            prompts = [{"prompt_index": 0, "content_filter_results": clean}]
            assert whole.model_extra["prompt_filter_results"] == prompts
            stream = await sdk.chat.completions.create(**CHAT, stream=True, extra_headers=asked)
            chunks = [it async for it in stream]
            assert chunks[1].model_extra["prompt_filter_results"] == prompts
            assert chunks[-1].choices[0].model_extra["content_filter_results"] == found
            unasked = await sdk.chat.completions.create(**CHAT)
            assert "content_filter_results" not in unasked.choices[0].model_extra
        assert {it.guard_rules for it in guard_events} == {"set/mail"}
        assert {it.withheld_tokens for it in guard_events} == {0}


@pytest.fixture
def guard_events(monkeypatch) -> list[RequestEvent]:
    found: list[RequestEvent] = []
    parse = RequestEvent.FromString
    monkeypatch.setattr(EventProducer, "emit", lambda _, payload: found.append(parse(payload)))
    return found


@pytest.mark.parametrize("is_free", [False, True])
async def test_a_block_cancels_at_once_and_withheld_tokens_are_in_the_ledger(
    world, eventually, guard_events, is_free: bool
) -> None:
    async with world() as w:
        await _guarded(w, eventually, is_withheld_free=is_free)
        shown, hidden = w.ids("Its name is "), w.ids("falcon, they")
        more = [[w.ids(" more")[0]]] * 400
        w.router.plan = lambda _: Plan([*[[it] for it in shown + hidden], *more])
        async with w.http(KEY) as http:
            answer = await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 240})
        usage = answer.json()["usage"]
        await eventually(lambda: w.router.cancelled)  # with nearly all of its steps to come
        [event] = guard_events
        assert (event.outcome, event.guard_rules) == ("content_filter", "set/word")
        # The comma ends the word; behind it no token is taken.
        assert event.output_tokens <= len(shown + hidden)
        assert 0 < event.withheld_tokens <= len(hidden)
        assert event.unbilled_tokens == (event.withheld_tokens if is_free else 0)
        assert usage["completion_tokens"] == event.output_tokens - event.unbilled_tokens


async def test_rules_hold_over_the_place_where_a_stream_is_resumed(
    world, eventually, guard_events
) -> None:
    async with world() as w:
        await _guarded(w, eventually)
        ids = w.ids(SAID)
        half = next(n for n in range(len(ids)) if "user" in w.tokenizer.decode(ids[:n])) + 1

        def plan(submit) -> Plan:
            if not submit.resumed_tokens:
                return Plan([[it] for it in ids[:half]], LOST)
            assert list(submit.prompt[-half:]) == ids[:half]
            return Plan([*[[it] for it in ids[half:]], [2]], wire.Outcome(kind=STOPS))

        w.router.plan = plan
        async with w.http(KEY) as http:
            chunks = await _events(http, "/v1/chat/completions", CHAT)
        pieces = [it["choices"][0]["delta"].get("content") or "" for it in chunks]
        assert "".join(pieces) == SHOWN
        assert guard_events[0].resumes == 1


JUDGED = control.GuardRule(
    id="rude", action="block", classifier="shipped", category="harassment", threshold=0.5,
    targets=["answer", "prompt"],
)  # fmt: skip
RUDE = "It is nice here. You are such a pathetic loser, shut up. Good bye"


def _judged_set(w, version: int = 1, **fields: object) -> None:
    objects = w.feed.objects
    del objects.guard_sets[:]
    rules = fields.pop("rules", [JUDGED])
    objects.guard_sets.add(
        id="judged", owner_tenant_id="one", version=version, rules=rules, active_version=version,
        active_rules=rules, **fields,
    )  # fmt: skip
    w.feed.replace(objects)


async def test_a_classifier_ends_an_answer_behind_its_fence_in_every_dialect(
    world, eventually, guard_events
) -> None:
    async with world() as w:
        sets = lambda: w.gateway.watcher.state.guard_sets  # noqa: E731
        shown = {
            "none": RUDE,
            "sentence": "It is nice here.",
            "tokens": "",
            "end": "",
        }
        w.text = RUDE
        async with w.http(KEY) as http:
            for fence, most in shown.items():
                _judged_set(w, fence=fence, fence_tokens=99)
                await eventually(
                    lambda it=fence: "judged" in sets() and sets()["judged"].fence == it
                )
                chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
                [choice] = chat["choices"]
                assert choice["finish_reason"] == "content_filter"
                assert most.startswith(choice["message"]["content"])
                chunks = await _events(http, "/v1/chat/completions", CHAT)
                assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
                pieces = [it["choices"][0]["delta"].get("content") or "" for it in chunks]
                assert most.startswith("".join(pieces))
                if fence == "sentence":
                    assert "".join(pieces) == most
                    assert len([it for it in pieces if it]) == 1
                assert (fence == "none") == ("loser" in _all_text([chat, chunks]))
            response = (await http.post("/v1/responses", json=RESPONSE)).json()
            assert response["incomplete_details"] == {"reason": "content_filter"}
            message = (await http.post("/v1/messages", json=MESSAGE)).json()
            assert message["stop_reason"] == "refusal"
            assert "loser" not in _all_text([response, message])
            w.text = SAID  # which is clean: all of it leaves, whatever the fence
            chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
            assert chat["choices"][0]["message"]["content"] == SAID
            chunks = await _events(http, "/v1/chat/completions", CHAT)
            assert "".join(it["choices"][0]["delta"].get("content") or "" for it in chunks) == SAID
            asked = {
                **CHAT,
                "messages": [{"role": "user", "content": "shut up, you pathetic loser"}],
            }
            refused = await http.post("/v1/chat/completions", json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_filter")
        assert {it.guard_rules for it in guard_events} == {"judged/rude", ""}
        ended = [it for it in guard_events if it.outcome == "content_filter"]
        # Without a fence all may be out before the verdict comes.
        assert len([it for it in ended if it.withheld_tokens]) >= len(ended) - 2 > 6


async def test_a_classifier_that_is_down_opens_or_closes_by_policy_and_never_hangs(
    world, eventually, tmp_path
) -> None:
    file = tmp_path / "classifiers.json"
    gone = {"name": "gone", "kind": "http", "url": "http://127.0.0.1:1/v1/moderations"}
    file.write_text(json.dumps([gone]))
    async with world(classifiers=file) as w:
        rule = control.GuardRule()
        rule.CopyFrom(JUDGED)
        rule.classifier = "gone"
        sets = lambda: w.gateway.watcher.state.guard_sets  # noqa: E731
        _judged_set(w, rules=[rule])
        await eventually(lambda: "judged" in sets())
        async with w.http(KEY) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == w.text
            assert answer.headers["x-sluice-unjudged"] == "gone"
            told = {"x-sluice-filter-results": "true"}
            answer = await http.post("/v1/chat/completions", json=CHAT, headers=told)
            found = answer.json()["choices"][0]["content_filter_results"]
            assert found["error"]["code"] == "content_filter_error"
            _judged_set(w, rules=[rule], is_closed_on_failure=True)
            await eventually(lambda: sets()["judged"].is_closed_on_failure)
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert "retry-after" in refused.headers
            del rule.targets[1:]  # of answers alone
            _judged_set(w, 2, rules=[rule], is_closed_on_failure=True)
            await eventually(lambda: len(sets()["judged"].active_rules[0].targets) == 1)
            chunks = await _events(http, "/v1/chat/completions", CHAT)
            assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
        failed = w.gateway.metrics.classifier_texts.labels("gone", "failed")._value.get()
        assert failed > 0


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
