from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.types import EngineLoad, PromptLogprobs, TokenLogprobs
from replica.host import news as news_module
from replica.host.frames import FrameEncoder, encode_prompt_logprobs, micros
from replica.host.news import Outbox, SequenceEnd, SequenceRecord, StepNews
from sluice.wire.engine.v1 import engine_pb2 as wire

Step = list[tuple[int, list[int]]]  # (sequence, new tokens of this sequence)


def decode(frame: bytes) -> wire.StepFrame:
    return wire.HostFrame.FromString(frame).step


def columns(frame: wire.StepFrame) -> dict[int, list[int]]:
    assert len(set(frame.sequence)) == len(frame.sequence) == len(frame.count)
    assert sum(frame.count) == len(frame.token)
    tokens = iter(frame.token)
    return {
        sequence: [next(tokens) for _ in range(count)]
        for sequence, count in zip(frame.sequence, frame.count, strict=True)
    }


def logprobs(frame: wire.StepFrame) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    message = frame.logprobs
    tops = iter(zip(message.top_token, message.top_logprob, strict=True))
    for sequence, logprob, count in zip(
        message.sequence, message.logprob, message.top_count, strict=True
    ):
        yield sequence, logprob, [next(tops) for _ in range(count)]
    assert next(tops, None) is None


def news_of(number: int, step: Step) -> StepNews:
    """News of a step. An odd sequence requests as many alternatives per logprob as its id."""
    news = StepNews(step=number, steps=1)
    ids = [sequence for sequence, tokens in step for _ in tokens]
    tokens = [token for _, tokens in step for token in tokens]
    if ids:
        news.has_runs = len(set(ids)) < len(ids)
        news.add_tokens(ids, tokens)
    for sequence, token in zip(ids, tokens, strict=True):
        if sequence % 2:
            news.add_logprobs(sequence, entry(sequence, token))
    return news


def entry(sequence: int, token: int) -> TokenLogprobs:
    top = tuple((token + i, float(-i)) for i in range(sequence))
    return TokenLogprobs(0, float(-(token % 1024)), top)


steps_of_runs = st.lists(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2**31), min_size=1, max_size=3)),
        max_size=4,
        unique_by=lambda pair: pair[0],
    ),
    max_size=8,
)
# The usual case, which has a separate code path: equal sequences, one token each per step.
steps_of_a_batch = st.integers(1, 5).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 2**31), min_size=rows, max_size=rows).map(
            lambda tokens: [(sequence, [token]) for sequence, token in enumerate(tokens)]
        ),
        max_size=8,
    )
)


@given(
    steps=steps_of_runs | steps_of_a_batch, grants=st.lists(st.booleans(), min_size=8, max_size=8)
)
def test_every_token_and_logprob_of_merged_frames_arrives_once_in_order(
    steps: list[Step], grants: list[bool]
) -> None:
    outbox, encoder = Outbox(0), FrameEncoder(10)
    got: dict[int, list[int]] = {}
    got_logprobs: dict[int, list[object]] = {}
    covered = last = 0

    def receive() -> None:
        nonlocal covered, last
        outbox.add_credit(1)
        news, _ = outbox.take(0)
        if news is None:
            return
        frame = decode(encoder.encode(news))
        covered += frame.steps
        last = frame.step
        for sequence, tokens in columns(frame).items():
            got.setdefault(sequence, []).extend(tokens)
        for sequence, *told in logprobs(frame):
            got_logprobs.setdefault(sequence, []).append(told)

    for number, step in enumerate(steps, start=1):
        assert outbox.post(news_of(number, step))
        if grants[number - 1]:
            receive()
    receive()
    wanted: dict[int, list[int]] = {}
    for step in steps:
        for sequence, tokens in step:
            wanted.setdefault(sequence, []).extend(tokens)
    assert got == wanted
    assert (covered, last) == (len(steps), len(steps))
    assert got_logprobs == {
        sequence: [[e.logprob, list(e.top)] for e in (entry(sequence, t) for t in tokens)]
        for sequence, tokens in wanted.items()
        if sequence % 2
    }


def test_prompt_logprobs_come_with_the_position_of_their_first_token() -> None:
    part = PromptLogprobs(9, 3, (TokenLogprobs(9, -1.5, ((7, -0.5),)), TokenLogprobs(9, -2.0)))
    news = StepNews()
    news.add_prompt_logprobs(encode_prompt_logprobs(4, part))
    assert not news.is_heartbeat
    assert news.entries == 3
    (told,) = decode(FrameEncoder(1).encode(news)).prompt_logprobs
    assert (told.sequence, told.first) == (4, 3)
    assert list(told.logprob) == [-1.5, -2.0]
    assert (list(told.top_count), list(told.top_token)) == ([1, 0], [7])


def test_without_credit_nothing_is_taken_and_one_frame_costs_one_credit() -> None:
    outbox = Outbox(1)
    outbox.post(StepNews(step=1, steps=1))
    assert outbox.take(0)[0] is not None
    outbox.post(StepNews(step=2, steps=1))
    outbox.post(StepNews(step=3, steps=1))
    assert outbox.take(0) == (None, False)
    outbox.add_credit(5)
    news, _ = outbox.take(0)
    assert news is not None
    assert (news.step, news.steps) == (3, 2)
    assert outbox.take(0) == (None, False)


def test_after_the_close_only_frames_with_credit_leave() -> None:
    outbox = Outbox(0)
    outbox.post(StepNews(step=1))
    outbox.close()
    assert outbox.take(0) == (None, True)
    outbox = Outbox(1)
    outbox.post(StepNews(step=1))
    outbox.close()
    news, is_over = outbox.take(0)
    assert news is not None
    assert is_over


@pytest.mark.parametrize("kind", ["tokens", "logprobs", "cache"])
def test_news_unread_by_a_router_is_bounded(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(news_module, "PENDING_ENTRIES_MAX", 20)
    outbox = Outbox(0)
    for step in range(3):
        news = StepNews()
        if kind == "tokens":
            news.add_tokens([1] * 8, [2] * 8)
        elif kind == "logprobs":
            news.add_logprobs(1, TokenLogprobs(1, -1.0, ((1, -1.0),) * 7))
        else:
            news.kv = {bytes([step, index]): False for index in range(8)}
        assert outbox.post(news) == (step < 2)


def ended(sequence: int, tokens: int = 1) -> SequenceEnd:
    return SequenceEnd(wire.Finished(sequence=sequence), SequenceRecord(output=[0] * tokens))


def ids_of(ends: list[SequenceEnd]) -> list[int]:
    return [end.finished.sequence for end in ends]


def test_ends_are_kept_until_credit_confirms_their_frame() -> None:
    outbox = Outbox(3)
    for sequence in (1, 2, 3):
        outbox.post(StepNews(ended=[ended(sequence)]))
        outbox.take(0)
    outbox.post(StepNews(ended=[ended(4)]))
    outbox.add_credit(2)
    assert ids_of(outbox.abandon()) == [3, 4]
    assert outbox.abandon() == []
    assert outbox.take(0) == (None, True)


def test_credit_confirms_nothing_that_was_not_sent() -> None:
    outbox = Outbox(0)
    outbox.post(StepNews(ended=[ended(1)]))
    outbox.add_credit(10)
    outbox.take(0)
    assert ids_of(outbox.abandon()) == [1]


def test_of_a_router_that_confirms_nothing_the_newest_ends_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(news_module, "UNCONFIRMED_TOKENS_MAX", 300)
    outbox = Outbox(100)
    for sequence in range(10):
        outbox.post(StepNews(ended=[ended(sequence, 50)]))
        outbox.take(0)
    assert ids_of(outbox.abandon()) == [8, 9]


def test_kv_events_say_the_last_word_and_are_numbered() -> None:
    encoder = FrameEncoder(10)
    a, b, c = (letter * 16 for letter in (b"a", b"b", b"c"))
    snapshot = StepNews(kv={a: True, b: True}, kv_reset=True)
    snapshot.merge(StepNews(kv={b: False, c: True}))
    events = decode(encoder.encode(snapshot)).kv_events
    assert (events.reset, events.number) == (True, 2)
    assert (events.stored, events.removed) == (a + c, b"")
    news = StepNews(kv={a: False, b: True})
    news.merge(StepNews(kv={b: False}))
    events = decode(encoder.encode(news)).kv_events
    assert (events.reset, events.number, events.stored) == (False, 4, b"")
    assert {events.removed[:16], events.removed[16:]} == {a, b}
    assert not wire.HostFrame.FromString(encoder.encode(StepNews())).step.HasField("kv_events")


def test_the_state_of_the_engine_is_in_every_frame() -> None:
    load = EngineLoad(3, 2, 7, 100, 0.0015, kv_blocks_pinned=4)
    state = decode(FrameEncoder(10).encode(StepNews(load=load))).state
    assert (state.running, state.waiting, state.kv_blocks_used) == (3, 2, 7)
    assert (state.kv_blocks_total, state.prefill_tokens_owed, state.step_us) == (10, 100, 1500)
    assert state.kv_blocks_pinned == 4


def test_resident_adapters_are_told_when_they_change() -> None:
    encoder = FrameEncoder(10, ("a",))

    def told(*resident: str) -> tuple[bool, list[str]]:
        load = replace(EngineLoad(), adapters_resident=tuple(resident))
        state = decode(encoder.encode(StepNews(load=load))).state
        return state.adapters_changed, list(state.adapters_resident)

    assert told("a") == (False, [])
    assert told("a", "b") == (True, ["a", "b"])
    assert told("a", "b") == (False, [])
    assert told() == (True, [])


def test_a_wait_of_hours_fits_into_its_field() -> None:
    assert micros(0.0015) == 1500
    assert wire.Admitted(queue_us=micros(1e6)).queue_us == 2**32 - 1
