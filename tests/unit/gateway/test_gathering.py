"""Gathered pieces of reasoning and calls add up to what the pieces themselves do, in their order."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta, joined
from gateway.dialects.dialect import Dialect
from gateway.dialects.forms import CallForm, ReasoningForm
from gateway.dispatch.gathering import DeltaGatherer, together
from gateway.dispatch.streamed import StreamedGeneration
from gateway.text.pipe import TextPipe
from tests.unit.gateway.test_streamed import TABLE, TOKENIZER, Writes, stream, unframed

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "some text", "b": [1, 2]}}\n</tool_call>'
ANSWER = f"<think>\nwhat to do\n</think>\n\nI call. {CALL}{CALL}"
PAUSE_S = 60.0

deltas = st.builds(
    AnswerDelta,
    st.sampled_from(["", "", "", "c"]),
    st.sampled_from(["", "r", "rr"]),
    st.lists(
        st.builds(CallDelta, st.integers(0, 1), st.sampled_from(["", "{}"]), name=st.just("")),
        max_size=3,
    ).map(tuple),
)


def pieces(delta: AnswerDelta) -> list[tuple[object, str]]:
    """Return what a delta says, in the order in which events tell it."""
    found = [("reasoning", delta.reasoning), ("content", delta.content)]
    return [it for it in found if it[1]] + [(it.index, it.arguments) for it in delta.calls]


def said(shown: list[AnswerDelta]) -> list[tuple[object, str]]:
    """Return the same of several, with neighbours of one kind as one."""
    grouped = itertools.groupby([it for delta in shown for it in pieces(delta)], lambda it: it[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in grouped]


@given(first=deltas, second=deltas)
def test_two_deltas_together_say_the_same_in_the_same_order(first, second) -> None:
    both = together(first, second)
    if both is not None:
        assert said([both]) == said([first, second])


@given(given_=st.lists(deltas, max_size=20), taken=st.sets(st.integers(0, 20)))
def test_nothing_is_lost_or_passed_over_whenever_the_pause_ends(given_, taken) -> None:
    async def run() -> None:
        gatherer, shown = DeltaGatherer(PAUSE_S, lambda: None), list[AnswerDelta]()
        for number, delta in enumerate(given_):
            if number in taken:
                shown.append(gatherer.take())
            shown += gatherer.passed(delta)
        shown.append(gatherer.close())
        assert said(shown) == said(given_)

    asyncio.run(run())


async def test_the_first_piece_leaves_at_once_and_others_when_the_pause_is_over() -> None:
    is_over = asyncio.Event()
    gatherer = DeltaGatherer(0.01, is_over.set)
    assert gatherer.passed(AnswerDelta("", "a")) == [AnswerDelta("", "a")]
    assert gatherer.passed(AnswerDelta("", "b")) == []
    async with asyncio.timeout(10):
        await is_over.wait()
    assert gatherer.take() == AnswerDelta("", "b")
    assert gatherer.close() is NOTHING


async def test_much_at_once_does_not_wait() -> None:
    gatherer = DeltaGatherer(PAUSE_S, lambda: None)
    gatherer.passed(AnswerDelta("", "a"))
    shown = [gatherer.passed(AnswerDelta("", "b" * 1000)) for _ in range(20)]
    assert any(shown)
    kept = gatherer.close()
    assert len(joined(AnswerDelta(), kept).reasoning) < 17_000


def _generation(gather_s: float) -> StreamedGeneration:
    ids = map("call_{}".format, itertools.count())
    parser = Dialect(CallForm.HERMES, ReasoningForm.THINK).parser(
        tools=("f",),
        is_parallel=True,
        new_call_id=lambda: next(ids),
        is_reasoning=False,
        is_forced=False,
    )
    generation = stream(pipe=TextPipe(TABLE, (), parser))
    generation.gather_for(gather_s)
    return generation


def _events(body: bytes) -> list[dict[str, Any]]:
    decoded = SSEDecoder().iter_bytes(iter([body]))
    return [json.loads(event.data)["choices"][0]["delta"] for event in decoded]


def _summed(events: list[dict[str, Any]]) -> tuple[str, str, dict[int, str]]:
    """Return content, reasoning and arguments by call, as SDKs add them up."""
    content = "".join(it.get("content", "") for it in events)
    reasoning = "".join(it.get("reasoning_content", "") for it in events)
    calls: dict[int, str] = {}
    for call in [call for it in events for call in it.get("tool_calls", ())]:
        calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    return content, reasoning, calls


@pytest.mark.parametrize("behind", ["", " and text behind it"])
async def test_a_stream_that_gathers_says_the_same_in_fewer_events(behind: str) -> None:
    told: list[list[dict[str, Any]]] = []
    for gather_s in (0.0, PAUSE_S):
        generation, transport = _generation(gather_s), Writes()
        generation.go_live(transport, is_chunked=True)
        for token in TOKENIZER.encode(ANSWER + behind, add_special_tokens=False).ids:
            generation.push_one(token, 1.0)
        last = generation.last_chunks("stop")
        assert generation.stop_writing() == b""
        told.append(_events(unframed(transport.written) + last))
    plain, gathered = told
    assert _summed(gathered) == _summed(plain)
    assert _summed(plain)[2] == {0: '{"a": "some text", "b": [1, 2]}'} | {
        1: '{"a": "some text", "b": [1, 2]}'
    }
    with_calls = [[it for it in events if "tool_calls" in it] for events in told]
    assert len(with_calls[1]) <= 4 < len(with_calls[0])


async def test_content_does_not_wait_and_comes_behind_the_reasoning_before_it() -> None:
    generation, transport = _generation(PAUSE_S), Writes()
    generation.go_live(transport, is_chunked=True)
    for token in TOKENIZER.encode("<think>\nso\n</think>\n\nyes", add_special_tokens=False).ids:
        generation.push_one(token, 1.0)
    events = _events(unframed(transport.written))
    assert _summed(events)[:2] == ("yes", "so\n")
    kinds = ["content" if it.get("content") else "reasoning" for it in events]
    assert kinds == sorted(kinds, reverse=True)


async def test_a_cut_stream_sends_its_gathered_tokens() -> None:
    generation, transport = _generation(PAUSE_S), Writes()
    generation.go_live(transport, is_chunked=True)
    for token in TOKENIZER.encode("<think>\nso far", add_special_tokens=False).ids:
        generation.push_one(token, 1.0)
    unsent = generation.stop_writing()
    assert _summed(_events(unframed(transport.written) + unsent))[1] == "so far"
    assert generation.stop_writing() == b""


async def test_metrics_have_the_engine_s_times_while_a_stream_gathers() -> None:
    generation, transport = _generation(PAUSE_S), Writes()
    generation.write_every(60.0)
    generation.go_live(transport, is_chunked=True)
    for number, token in enumerate(TOKENIZER.encode(ANSWER, add_special_tokens=False).ids):
        generation.push_one(token, 1.0 + number * 0.25)
    assert generation.itl_max_s == 0.25
    (family,) = generation._itl.collect()
    total = next(it.value for it in family.samples if it.name.endswith("_sum"))
    assert total == 0.25 * (len(generation.emitted) - 1)
    assert not transport.written
    generation.stop_writing()
