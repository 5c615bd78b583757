from hypothesis import given
from hypothesis import strategies as st

from replica.engine.types import EngineLoad
from replica.host_frames import FrameEncoder, Outbox, StepNews
from sluice.wire.engine.v1 import engine_pb2 as wire


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


@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 2**63), st.integers(0, 2**31), max_size=5), max_size=8
    ),
    grants=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_whatever_is_merged_every_token_arrives_once_in_order(
    steps: list[dict[int, int]], grants: list[bool]
) -> None:
    outbox, encoder = Outbox(0), FrameEncoder(10)
    got: dict[int, list[int]] = {}
    covered = last = 0
    wanted: dict[int, list[int]] = {}

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

    for number, tokens in enumerate(steps, start=1):
        news = StepNews(step=number, steps=1)
        news.ids += tokens.keys()
        news.tokens += tokens.values()
        assert outbox.post(news)
        for sequence, token in tokens.items():
            wanted.setdefault(sequence, []).append(token)
        if grants[number - 1]:
            receive()
    receive()
    assert got == wanted
    assert (covered, last) == (len(steps), len(steps))


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


def test_after_the_close_only_what_has_credit_goes_out() -> None:
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
    load = EngineLoad(3, 2, 7, 100, 0.0015)
    state = decode(FrameEncoder(10).encode(StepNews(load=load))).state
    assert (state.running, state.waiting, state.kv_blocks_used) == (3, 2, 7)
    assert (state.kv_blocks_total, state.prefill_tokens_owed, state.step_us) == (10, 100, 1500)
