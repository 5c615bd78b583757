"""What chat completions and completions share, and what of it the engine is told."""

import json
from dataclasses import dataclass

import pytest

from gateway.bodies.budget import output_budget
from gateway.bodies.chat import ChatRequest, parse_chat_request
from sluice.errors import BadRequestError, ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine

GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Authors:
    temperature: float = 0.5
    top_p: float = 0.25
    top_k: int = 7


def parse(**extra: object) -> ChatRequest:
    return parse_chat_request(json.dumps(GOOD | extra).encode())


def sampling(**extra: object) -> engine.Sampling:
    return parse(**extra).sampling(Authors())


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": 1}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"01": 1}}, "logit_bias.01"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10.0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"metadata": {str(i): "x" for i in range(20)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"session_id": "x" * 600}, "session_id"),
        ({"priority": 1}, "priority"),
        ({"priority": -4}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
    ],
)  # fmt: skip
def test_bounds(extra: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(**extra)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_unset_parameters_are_left_to_the_base_and_the_engine() -> None:
    assert sampling() == engine.Sampling(temperature=0.5, top_p=0.25, top_k=7)


def test_all_of_sampling() -> None:
    told = sampling(
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-1,
        min_p=0.125,
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.5,
        min_tokens=4,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"3": -100, "7": 0.5},
        regex="a+",
    )
    assert told == engine.Sampling(
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=(1 << 64) - 1,
        min_p=0.125,
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.5,
        tokens_min=4,
        logprobs=2,
        bias_token=[3, 7],
        logit_bias=[-100, 0.5],
        grammar=engine.Grammar(kind=engine.Grammar.KIND_REGEX, text="a+"),
    )


def test_the_tokens_own_probability_alone() -> None:
    told = sampling(logprobs=True)
    assert told.HasField("logprobs")
    assert told.logprobs == 0


def test_top_p_zero_is_the_best_token_and_not_off() -> None:
    assert 0 < sampling(top_p=0).top_p < 1e-5
    assert sampling(top_p=1).top_p == 1


def test_the_least_repetition_penalty_is_not_below_the_engines_bound_in_32_bits() -> None:
    assert sampling(repetition_penalty=0.01).repetition_penalty >= 0.01
    assert sampling(repetition_penalty=0.02).repetition_penalty == pytest.approx(0.02)


def test_top_k_off() -> None:
    assert sampling(top_k=-1).top_k == 0
    assert sampling(top_k=0).top_k == 0


def test_ids_beyond_the_vocabulary() -> None:
    request = parse(logit_bias={"99": 1})
    request.check_vocabulary(100)
    with pytest.raises(BadRequestError) as caught:
        request.check_vocabulary(99)
    assert caught.value.param == "logit_bias"


def test_stops_and_choices() -> None:
    assert parse(stop="x").stops == ["x"]
    assert parse(stop=["a", "b", "c", "d"]).stops == ["a", "b", "c", "d"]
    assert parse(n=8).choices == 8


def test_streams_report_usage_if_asked() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage


def test_a_session_has_two_names() -> None:
    assert parse(prompt_cache_key="k").session == "k"
    assert parse(prompt_cache_key="k", session_id="s").session == "s"


@pytest.mark.parametrize(
    ("asked", "served"),
    [("auto", "default"), ("default", "default"), ("priority", "default"), ("flex", "flex")],
)
def test_the_tier_that_served(asked: str, served: str) -> None:
    request = parse(service_tier=asked)
    assert request.served_tier == served
    assert request.is_lowered == (served == "flex")


def test_a_lowered_request_is_reported_as_flex() -> None:
    assert parse(service_tier="default", priority=-1).served_tier == "flex"
    assert parse(service_tier="default", priority=0).served_tier == "default"
    assert parse(priority=-1).served_tier is None


def test_lowered_requests_go_behind_their_own_tier_and_before_the_next() -> None:
    below = [parse(priority=-level).queue_priority(5) for level in range(4)]
    assert below == sorted(below, reverse=True)
    assert len(set(below)) == 4
    assert parse().queue_priority(4) < below[-1]
    assert parse().queue_priority(0) >= 0
    assert parse(service_tier="flex").queue_priority(5) == below[1]
    assert parse(service_tier="flex", priority=-3).queue_priority(5) == below[3]
    assert parse(priority=-1).is_lowered
    assert not parse(priority=0).is_lowered


def test_the_budget_of_an_answer() -> None:
    assert output_budget(parse(), 10, 100) == 90
    assert output_budget(parse(max_tokens=90), 10, 100) == 90
    assert output_budget(parse(), 10, 0) > 1_000_000
    for request, prompt in ((parse(max_tokens=91), 10), (parse(), 100)):
        with pytest.raises(BadRequestError) as caught:
            output_budget(request, prompt, 100)
        assert caught.value.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert caught.value.param == "messages"
    with pytest.raises(BadRequestError) as caught:
        output_budget(parse(), 0, 100)
    assert caught.value.param == "messages"
    with pytest.raises(BadRequestError) as caught:
        output_budget(parse(min_tokens=50), 60, 100)
    assert caught.value.param == "min_tokens"
