"""Parameters from the body to the router: what a request asks for is what an engine is told."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice.hashing import session_hash
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import LIMITED_KEY, TIER_DEADLINE_MS
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

Grammar = engine.Grammar
BODY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
CASES: list[tuple[dict[str, Any], Callable[[wire.Submit], object], object]] = [
    ({"seed": 7}, lambda s: s.sampling.seed, 7),
    ({"temperature": 0}, lambda s: s.sampling.temperature, 0),
    ({"temperature": 1.5}, lambda s: s.sampling.temperature, 1.5),
    ({"top_p": 0.5}, lambda s: s.sampling.top_p, 0.5),
    ({"top_p": 0}, lambda s: 0 < s.sampling.top_p < 1e-5, True),
    ({"top_k": 5}, lambda s: s.sampling.top_k, 5),
    ({"min_p": 0.25}, lambda s: s.sampling.min_p, 0.25),
    ({"presence_penalty": 1}, lambda s: s.sampling.presence_penalty, 1),
    ({"frequency_penalty": -1}, lambda s: s.sampling.frequency_penalty, -1),
    ({"repetition_penalty": 1.5}, lambda s: s.sampling.repetition_penalty, 1.5),
    ({"logit_bias": {"5": -100}}, lambda s: list(s.sampling.bias_token), [5]),
    ({"logit_bias": {"5": -100}}, lambda s: list(s.sampling.logit_bias), [-100]),
    ({"min_tokens": 2, "max_tokens": 4}, lambda s: s.sampling.tokens_min, 2),
    ({"max_tokens": 4}, lambda s: s.output_tokens_max, 4),
    ({"ignore_eos": True}, lambda s: s.ignore_eos, True),
    ({"regex": "a+"}, lambda s: s.sampling.grammar, Grammar(kind=Grammar.KIND_REGEX, text="a+")),
    ({"choice": ["a"]}, lambda s: s.sampling.grammar.kind, Grammar.KIND_CHOICE),
    (
        {"response_format": {"type": "json_object"}},
        lambda s: s.sampling.grammar.kind,
        Grammar.KIND_JSON,
    ),
    ({"deadline_ms": 1234}, lambda s: s.deadline_ms, 1234),
    ({"session_id": "s"}, lambda s: s.session_hash, session_hash("one", "s")),
    ({"prompt_cache_key": "k"}, lambda s: s.session_hash, session_hash("one", "k")),
    ({}, lambda s: s.is_preemptible, False),
    ({"service_tier": "flex"}, lambda s: s.is_preemptible, True),
    ({"priority": -3}, lambda s: s.is_preemptible, True),
]


@pytest.mark.parametrize("path", BODY)
async def test_the_router_gets_the_parameters_of_the_request(world: Any, path: str) -> None:
    async with world() as w, w.http() as http:
        for extra, read, expected in CASES:
            body = {"model": "tiny"} | BODY[path] | extra
            response = await http.post(path, json=body)
            assert response.status_code == 200, (extra, response.text)
            assert read(w.router.submits[-1]) == expected, extra


async def test_a_lowered_request_goes_behind(world: Any) -> None:
    async with world() as w, w.http() as http:
        for extra in ({}, {"service_tier": "flex"}, {"priority": -3}):
            await http.post("/v1/completions", json={"model": "tiny", "prompt": "a"} | extra)
        ordinary, flex, last = [submit.tier_priority for submit in w.router.submits]
        assert ordinary > flex > last


async def test_the_deadline_of_a_tier_decides_admission_unless_the_request_sets_one(
    world: Any,
) -> None:
    async with world() as w, w.http(LIMITED_KEY) as http:
        for own in ({}, {"deadline_ms": 1}, {"deadline_ms": 5 * TIER_DEADLINE_MS}):
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1} | own
            await http.post("/v1/completions", json=body)
        told = [(submit.deadline_ms, submit.admission_ms) for submit in w.router.submits]
        assert told == [(0, TIER_DEADLINE_MS), (1, 0), (5 * TIER_DEADLINE_MS, 0)]


async def test_the_tier_that_served_is_told(world: Any) -> None:
    async with world() as w, w.http() as http:
        for asked, served in (("flex", "flex"), ("priority", "default"), (None, None)):
            body = {"model": "tiny", "prompt": "a", "service_tier": asked}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer.get("service_tier") == served


async def test_n_and_lists_of_prompts(world: Any) -> None:
    async with world() as w, w.http() as http:
        body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "echo": True, "seed": 1}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"][:1] for choice in answer["choices"]] == list("aabb")
        assert len({submit.sampling.seed for submit in w.router.submits}) == 4


async def test_token_ids_are_the_prompt(world: Any) -> None:
    async with world() as w, w.http() as http:
        body = {"model": "tiny", "prompt": [5, 6, 7]}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert list(w.router.submits[-1].prompt) == [5, 6, 7]


async def test_stop_strings(world: Any) -> None:
    async with world() as w, w.http() as http:
        w.router.plan = lambda _: Plan([[token] for token in w.ids(w.text)])
        for path, body in BODY.items():
            sent = {"model": "tiny", "stop": ["xyz", "wor"], "max_tokens": 60} | body
            (choice,) = (await http.post(path, json=sent)).json()["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text == w.text[: w.text.index("wor")]
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"logit_bias": {"999999": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": [999_999]}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [999_999]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
        ("/v1/completions", {"prompt": ["a", "b", "c " * 1000], "n": 2}, "prompt[2]"),
        ("/v1/completions", {"prompt": ["a"], "max_tokens": 1000}, "prompt"),
        ("/v1/chat/completions", {"max_tokens": 1000}, "messages"),
        ("/v1/completions", {"max_tokens": 1000}, "prompt"),
        ("/v1/chat/completions", {"min_tokens": 1000}, "min_tokens"),
        ("/v1/chat/completions", {"moderation": {}}, "moderation"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
    ],
)
async def test_refusals_name_the_parameter(
    world: Any, path: str, extra: dict[str, Any], param: str
) -> None:
    async with world() as w, w.http() as http:
        response = await http.post(path, json={"model": "tiny"} | BODY[path] | extra)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert w.router.submits == []


TOOL = {"type": "function", "function": {"name": "f"}}
ASKED = {
    "grammar": [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("regex", {"regex": "a"}),
        ("choice", {"choice": ["a"]}),
    ],
    "logprobs": [("top_logprobs", {"logprobs": True, "top_logprobs": 2}), ("logprobs", {})],
    "tokens_min": [("min_tokens", {"min_tokens": 2})],
    "logit_bias": [("logit_bias", {"logit_bias": {"5": 1}})],
    "repetition_penalty": [("repetition_penalty", {"repetition_penalty": 2})],
    "adapter_digest": [("model", {})],
    "cache_root": [(None, {})],  # ours, of no field
    "": [(None, {})],
}


@pytest.mark.parametrize("code", ["engine_refused", "invalid_request"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_refusals_of_engines_name_the_parameter(
    world: Any, code: str, is_stream: bool
) -> None:
    chat, text = BODY
    async with world() as w, w.http() as http:
        for param, cases in ASKED.items():
            outcome = wire.Outcome(
                kind=wire.OUTCOME_KIND_FAILED, code=code, message="not here", param=param
            )
            w.router.plan = lambda _, outcome=outcome: Plan([], outcome)
            own = [("tools", {"tools": [TOOL], "tool_choice": "required"})]
            for name, extra in cases + own * (param == "grammar"):
                body = {"model": "tiny", "stream": is_stream} | BODY[chat] | extra
                response = await http.post(chat, json=body)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, code)
                assert (error["param"], "not here" in error["message"]) == (name, True)
            name, extra = ("logprobs", {"logprobs": 2}) if param == "logprobs" else cases[-1]
            body = {"model": "tiny", "stream": is_stream} | BODY[text] | extra
            assert (await http.post(text, json=body)).json()["error"]["param"] == name


async def test_keywords_that_are_not_enforced_are_told(world) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    calling = {"tools": [tool], "tool_choice": "required"}
    async with world() as w, w.http() as http:
        for extra, ignored in (
            ({}, None),
            ({"response_format": form}, "uniqueItems"),
            ({"response_format": form, "stream": True}, "uniqueItems"),
            (calling, "not"),
            (calling | {"response_format": form}, "not"),
            (calling | {"response_format": form, "tool_choice": "auto"}, "not, uniqueItems"),
        ):
            answer = await http.post("/v1/chat/completions", json=body | extra)
            assert answer.is_success
            assert answer.headers.get("x-sluice-ignored-keywords") == ignored
