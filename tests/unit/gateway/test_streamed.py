"""The bytes of a stream are events that the official SDK's parser reads back as the same text."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.dispatch.generation import EndKind, GenerationSpec
from gateway.dispatch.pace import AttemptPace, Lag
from gateway.dispatch.streamed import BUFFER_BYTES_MAX, StreamedGeneration
from gateway.metrics import FastHistogram
from gateway.text.detokenizer import token_table
from gateway.text.pipe import TextPipe
from gateway.text.sse import DONE, ChatChunks, StreamHead
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine
from tests.support.scripted_router import NeverLags


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
TABLE = token_table(TOKENIZER)
SPEC = GenerationSpec(
    request_id="r", tenant_id="t", tier_priority=0, tenant_weight=0, pool_id="p", adapter_digest="",
    cache_root=b"", prompt=[1], output_tokens_max=100, end_ids=frozenset(), sampling=engine.Sampling(),
    session_hash=0, deadline_ms=0, ignore_eos=False, traceparent="",
    new_pipe=lambda: TextPipe(TABLE),
)  # fmt: skip


class Transport(asyncio.WriteTransport):
    """Keeps what is written; `unread` and `is_gone` play clients that do not read, or hung up."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.is_gone = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_gone:
            raise RuntimeError("the handler is closed")  # as uvloop does
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unread


def stream(
    stops: tuple[str, ...] = (), lag: Lag | None = None, pipe: TextPipe | None = None
) -> StreamedGeneration:
    chunks = ChatChunks(StreamHead("chat.completion.chunk", 'id"1', "mödel", 7))
    itl = FastHistogram("x", "x", (0.1,))
    spec = SPEC._replace(new_pipe=lambda: pipe or TextPipe(TABLE, stops))
    return StreamedGeneration(spec, chunks, itl, AttemptPace(lag or NeverLags()))


def unframed(data: bytes) -> bytes:
    """Undo HTTP/1.1 chunked coding, strictly."""
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        body, data = body + rest[:length], rest[length + 2 :]
    return body


def texts(body: bytes) -> list[str]:
    events = list(SSEDecoder().iter_bytes(iter([body])))
    assert events[-1].data == "[DONE]"
    documents = [json.loads(event.data) for event in events[:-1]]
    assert all(d["id"] == 'id"1' and d["model"] == "mödel" for d in documents)
    return [d["choices"][0]["delta"].get("content", "") for d in documents]


@given(
    text=st.text(max_size=40),
    live_from=st.integers(0, 40),
    group=st.integers(1, 5),
    stops=st.sampled_from([(), ("zzz",)]),
)
def test_every_streamed_text_arrives_unchanged(text, live_from: int, group: int, stops) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    generation, transport = stream(stops), Transport()
    head = b""
    for number, start in enumerate(range(0, len(ids), group)):
        if number == live_from:
            head = generation.take_early()
            generation.go_live(transport, is_chunked=True)
        generation.push(ids[start : start + group], float(number))
    tail = generation.last_chunks("stop")
    shown = texts(head + unframed(transport.written) + tail + DONE)
    assert "".join(shown) == text
    assert list(generation.emitted) == ids


def test_without_chunked_coding_the_bytes_are_bare() -> None:
    generation, transport = stream(), Transport()
    generation.go_live(transport, is_chunked=False)
    generation.push([40], 0.0)
    generation.push([41, 42], 0.0)
    assert "".join(texts(transport.written + DONE)) == TOKENIZER.decode([40, 41, 42])


def test_a_reader_that_is_too_far_behind_ends_the_stream() -> None:
    generation, transport = stream(), Transport()
    generation.go_live(transport, is_chunked=True)
    transport.unread = BUFFER_BYTES_MAX + 1
    for _ in range(40):
        generation.push([40], 0.0)
    assert generation.ending is not None
    assert (generation.ending.kind, generation.ending.code) == (
        EndKind.REFUSED,
        ErrorCode.SLOW_READER,
    )
    assert len(generation.emitted) == 16


def test_a_client_that_hung_up_ends_its_own_stream_and_nothing_else() -> None:
    generation, transport = stream(), Transport()
    generation.go_live(transport, is_chunked=True)
    generation.push([40], 0.0)
    transport.is_gone = True
    generation.push([41], 1.0)
    generation.push([42], 2.0)
    assert generation.ending is not None
    assert generation.ending.code is ErrorCode.CLIENT_CLOSED
    assert list(generation.emitted) == [40, 41]


class Lagging:
    is_lagging = True


def step(generation: StreamedGeneration, *tokens: int) -> None:
    """One message of a router: a step that brings these tokens, or none."""
    before = generation._pace.begin_step()
    for token in tokens:
        generation.push_one(token, 1.0)
    generation._pace.end_step(before)


async def test_while_the_loop_lags_two_steps_share_a_write() -> None:
    generation, transport = stream(lag=Lagging()), Transport()
    generation.go_live(transport, is_chunked=True)
    sizes = []
    for token in (40, 41, 42, 43):
        step(generation, token)
        sizes.append(len(transport.written))
    assert sizes[0] == 0
    assert sizes[1] == sizes[2] > 0
    assert "".join(texts(unframed(transport.written) + DONE)) == TOKENIZER.decode([40, 41, 42, 43])


async def test_a_step_without_news_releases_held_text() -> None:
    generation, transport = stream(lag=Lagging()), Transport()
    generation.go_live(transport, is_chunked=True)
    step(generation, 40)
    assert not transport.written
    step(generation)
    assert texts(unframed(transport.written) + DONE) == [TOKENIZER.decode([40])]


async def test_without_another_step_time_releases_it() -> None:
    generation, transport = stream(lag=Lagging()), Transport()
    generation.go_live(transport, is_chunked=True)
    step(generation, 40)
    async with asyncio.timeout(5):
        while not transport.written:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert texts(unframed(transport.written) + DONE) == [TOKENIZER.decode([40])]


async def test_text_held_at_the_end_leaves_with_the_end() -> None:
    generation, transport = stream(lag=Lagging()), Transport()
    generation.go_live(transport, is_chunked=True)
    step(generation, 40)
    assert not transport.written
    assert texts(generation.last_chunks("stop") + DONE)[0] == TOKENIZER.decode([40])
    assert generation.last_chunks("stop").count(b"data: ") == 1


async def test_after_the_end_of_a_response_nothing_is_written() -> None:
    generation, transport = stream(lag=Lagging()), Transport()
    generation.go_live(transport, is_chunked=True)
    step(generation, 40)
    assert texts(generation.stop_writing() + DONE) == [TOKENIZER.decode([40])]
    generation.keep_alive()
    generation.release()
    step(generation)
    step(generation, 41, 42)
    await asyncio.sleep(0.05)  # more than a token may be held
    assert not transport.written


class Writes(Transport):
    """Keeps each write by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.each: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.each.append(bytes(data))


async def test_with_an_interval_many_steps_share_a_write_and_none_is_lost() -> None:
    transport, generation = Writes(), stream()
    generation.write_every(0.05)
    generation.go_live(transport, is_chunked=True)
    for token in TOKENIZER.encode("written").ids:
        step(generation, token)
    assert not transport.each  # the first bytes left just before
    async with asyncio.timeout(10):
        while not transport.each:  # noqa: ASYNC110 - a transport tells nobody
            await asyncio.sleep(0.001)
    assert "".join(texts(unframed(transport.written) + DONE)) == "written"
    assert len(transport.each) == 1
    for token in TOKENIZER.encode("more").ids:
        step(generation, token)
    unsent = generation.stop_writing()
    assert "".join(texts(unframed(transport.written) + unsent + DONE)) == "writtenmore"
    assert len(transport.each) == 2
    await asyncio.sleep(0.1)
    assert len(transport.each) == 2  # the connection may have the next response by now


async def test_without_chunked_coding_an_interval_leaves_the_bytes_bare() -> None:
    transport, generation = Writes(), stream()
    generation.write_every(60.0)
    generation.go_live(transport, is_chunked=False)
    for token in TOKENIZER.encode("bare").ids:
        step(generation, token)
    generation.stop_writing()
    assert "".join(texts(transport.written + DONE)) == "bare"
    assert len(transport.each) == 1


async def test_a_client_that_hung_up_ends_a_stream_with_an_interval_too() -> None:
    transport, generation = Writes(), stream()
    generation.write_every(0.01)
    generation.go_live(transport, is_chunked=True)
    step(generation, *TOKENIZER.encode("a").ids)
    transport.is_gone = True
    async with asyncio.timeout(10):
        while generation.ending is None:  # noqa: ASYNC110 - it tells its listener
            await asyncio.sleep(0.001)
    assert generation.ending.code is ErrorCode.CLIENT_CLOSED


async def test_much_text_does_not_wait_for_the_interval() -> None:
    transport, generation = Writes(), stream()
    generation.write_every(60.0)
    generation.go_live(transport, is_chunked=True)
    for _ in range(600):
        step(generation, *TOKENIZER.encode("a").ids)
    assert len(transport.each) >= 1
    generation.stop_writing()
    assert "".join(texts(unframed(transport.written) + DONE)) == "a" * 600


def test_marks_are_shown_alike_whichever_way_they_take() -> None:
    mark = TOKENIZER.token_to_id("!")
    hiding = token_table(TOKENIZER, [mark])
    for table, shown in ((hiding, "aa"), (hiding.showing([mark]), "a!a")):
        for group in (1, 3):
            generation = stream(pipe=TextPipe(table))
            ids = TOKENIZER.encode("a!a", add_special_tokens=False).ids
            for start in range(0, 3, group):
                piece = ids[start : start + group]
                if group == 1:
                    generation.push_one(piece[0], 1.0)
                else:
                    generation.push(piece, 1.0)
            assert "".join(texts(generation.last_chunks("stop") + DONE)) == shown
