"""The hot path, which writes an engine step's tokens to a client's socket in one synchronous call.

Every gateway needs one `send()` per token, and a token may cost little more than this call. So the
path has no await, no task switch, no JSON encoder and no call into aiohttp. After the response's
first chunk has been sent, chunks are framed here and written to the transport directly.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache

from gateway.dialects.delta import NOTHING, AnswerDelta
from gateway.dispatch.gathering import DeltaGatherer
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd, GenerationSpec
from gateway.dispatch.interval_writer import IntervalWriter
from gateway.dispatch.pace import AttemptPace
from gateway.metrics import FastHistogram
from gateway.text.detokenizer import json_fragment
from gateway.text.logprobs import TokenLogprob
from gateway.text.sse import KEEP_ALIVE, ChunkWriter, CountedChunks, StreamHead, annotated
from sluice.errors import ErrorCode

# Bytes (about a thousand tokens) that a slow client may leave unread before its stream is ended.
BUFFER_BYTES_MAX = 256 << 10
_CHECK_EVERY = 16  # tokens between checks of the write buffer's size
_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(4096))  # size lines of HTTP/1.1 chunks


class _LastStep:
    """The pace at the end of a stream, which delays the last token to write it with the end."""

    is_holding = True

    def hold(self, holder: object) -> None:
        """Do nothing, because the end of the stream writes the delayed chunk."""


_LAST_STEP = _LastStep()


class StreamedGeneration(Generation):
    """Writes tokens to the client as they are generated. Before `go_live`, it stores them."""

    __slots__ = (
        "_early",
        "_fragments",
        "_frame_bytes",
        "_gatherer",
        "_head",
        "_held",
        "_interval",
        "_interval_s",
        "_is_counted",
        "_is_plain",
        "_itl",
        "_pace",
        "_tail",
        "_transport",
        "_until_check",
        "_write",
        "chunks",
    )

    def __init__(
        self,
        spec: GenerationSpec,
        chunks: ChunkWriter,
        itl: FastHistogram,
        pace: AttemptPace,
    ) -> None:
        """Store the tokens until `go_live`.

        Args:
            spec: The requested answer.
            chunks: Writer of this choice's chunks.
            itl: Histogram of all gaps between tokens.
            pace: Decides whether a token may wait for the next step.
        """
        super().__init__(spec)
        self.chunks = chunks
        self._fragments = self.pipe.table.fragments
        self._itl = itl
        self._pace: AttemptPace | _LastStep = pace
        self._held = b""  # a delayed chunk, written together with the next chunk
        self._is_counted = False
        self._is_plain = self._line is None and self.guard is None and self.pipe.is_transparent
        self._early: list[bytes] | None = []
        self._tail = _framed(chunks.tail)
        self.take_head()
        self._transport: asyncio.WriteTransport | None = None
        self._until_check = _CHECK_EVERY
        self._interval_s = 0.0
        self._interval: IntervalWriter | None = None
        self._gatherer: DeltaGatherer | None = None

    def write_every(self, interval_s: float) -> None:
        """Write once per `interval_s`, or at every token if it is 0. Call before `go_live`."""
        self._interval_s = interval_s

    def gather_for(self, pause_s: float) -> None:
        """Gather pieces of reasoning and calls for up to `pause_s`. Call before `go_live`."""
        self._gatherer = DeltaGatherer(pause_s, self._show_gathered) if pause_s else None

    def take_head(self) -> None:
        """Copy the bytes that precede each chunk's text. Call again when `chunks.head` changes."""
        self._head = self.chunks.head
        self._frame_bytes = len(self._head) + len(self.chunks.tail)

    def count_usage(self, head: StreamHead) -> None:
        """Report the usage so far in every chunk. Call before the first token."""
        self.chunks = CountedChunks(self.chunks, head, len(self.spec.prompt), self.emitted.__len__)
        self._is_counted = True
        self._is_plain = False

    def push(self, tokens: Sequence[int], now_s: float) -> None:
        """Process the tokens of one engine step and send their text."""
        if self.ending is not None:
            return
        self.emitted.extend(tokens)
        self._note_gap(now_s)
        self._push_slowly(tokens)

    def push_one(self, token: int, now_s: float) -> None:
        """Process and send the token of a step that computed exactly one token, the usual case."""
        if self.ending is not None:
            return
        self.emitted.append(token)
        self._note_gap(now_s)
        fragment = self._fragments[token] if self._is_plain else None
        if fragment is None:
            self._push_slowly((token,))
        elif fragment:
            self._send(fragment)

    def expect_end(self) -> None:
        """Delay the last token until the end of the answer, which saves one write."""
        self._pace = _LAST_STEP

    def _note_gap(self, now_s: float) -> None:
        if self.is_fresh:
            self.note_time(now_s)
            return
        gap_s = now_s - self.last_at_s
        self.last_at_s = now_s
        if gap_s > self.itl_max_s:  # noqa: PLR1730 - a call of max() costs as much as the rest
            self.itl_max_s = gap_s
        self._itl.observe(gap_s)

    def _push_slowly(self, tokens: Sequence[int]) -> None:
        pipe = self.pipe
        delta, entries = self.taken(tokens)
        if (guard := self.guard) is not None:
            delta, entries = guard.passed(delta, entries, len(self.emitted))
        elif self._line is None:
            self._is_plain = pipe.is_transparent and not self._is_counted
            if self._is_plain and self._gatherer is not None:
                # Later content may bypass the gatherer, so the gathered pieces are sent first.
                self._show_gathered()
        if delta is not NOTHING or entries:
            self.show(delta, entries)
        if guard is not None and guard.blocked_by:
            self.end(GenerationEnd(EndKind.FILTERED, ErrorCode.CONTENT_FILTER))
        elif pipe.is_stopped:
            self.end(GenerationEnd(EndKind.STOP))

    def show(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        """Send a piece of the answer, or gather it with later pieces."""
        gatherer = self._gatherer
        if gatherer is None or self._early is not None:
            self._show(delta, entries)
        elif entries or self._is_plain:
            self._show_gathered()
            self._show(delta, entries)
        else:
            for piece in gatherer.passed(delta):
                self._show(piece, [])

    def _show_gathered(self) -> None:
        if self._gatherer is not None and (kept := self._gatherer.take()) is not NOTHING:
            self._show(kept, [])

    def _show(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        if not (delta.reasoning or delta.calls or entries or self._is_counted):
            if delta.content:
                self._send(json_fragment(delta.content))
            return
        self.send(self._chunk(delta, entries))

    def _chunk(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> bytes:
        form = self._format_logprobs
        return self.chunks.delta(delta, form(entries) if form is not None and entries else None)

    def _send(self, fragment: bytes) -> None:
        if self._early is not None:
            self._early.append(self.chunks.head + fragment + self.chunks.tail)
            return
        size = self._frame_bytes + len(fragment)
        held = self._held
        if held:
            size += len(held)
            self._held = b""
        elif self._pace.is_holding:
            self._held = b"".join((self._head, fragment, self.chunks.tail))
            self._pace.hold(self)
            return
        line = _SIZE_LINES[size] if size < 4096 else b"%x\r\n" % size
        self._write_frame(b"".join((line, held, self._head, fragment, self._tail)))
        self._until_check -= 1
        if not self._until_check:
            self._check_reader()

    def send(self, chunk: bytes) -> None:
        """Send whole events at once. Before `go_live`, store them for the first chunk."""
        if self._early is not None:
            self._early.append(chunk)
        elif chunk := self._take_held() + chunk:
            self._write_frame(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self._check_reader()

    def release(self) -> None:
        """Write the tokens that waited for the next step."""
        if self._held:
            self.send(b"")

    def _take_held(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _take_rest(self) -> bytes:
        """Return all unsent chunks in their order, and stop gathering."""
        rest, self._held = self._held, b""
        if self._gatherer is not None:
            kept, self._gatherer = self._gatherer.close(), None
            rest += b"" if kept is NOTHING else self._chunk(kept, [])
        return rest + self.take_early() if self._early else rest

    def keep_alive(self) -> None:
        """Send an SSE comment, so that client and proxies do not close a silent stream."""
        if self._early is None:
            self.send(KEEP_ALIVE)

    def _write_frame(self, frame: bytes) -> None:
        try:
            self._write(frame)
        except RuntimeError:
            self._end_closed()

    def _end_closed(self) -> None:
        """End the generation after its connection was closed, before the handler is cancelled."""
        self.end(GenerationEnd(EndKind.REFUSED, ErrorCode.CLIENT_CLOSED, "The client hung up."))

    def _check_reader(self) -> None:
        self._until_check = _CHECK_EVERY
        transport = self._transport
        if self.ending is not None or transport is None:
            return
        if transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            text = "The client reads too slowly; the stream was cut."
            self.end(GenerationEnd(EndKind.REFUSED, ErrorCode.SLOW_READER, text))

    def take_early(self) -> bytes:
        """Remove and return the chunks that were stored before `go_live`."""
        early = b"".join(self._early or ())
        if self._early is not None:
            self._early.clear()
        return early

    def go_live(self, transport: asyncio.WriteTransport, *, is_chunked: bool) -> None:
        """Write to the transport from now on, after the response's first chunk was sent.

        The caller must not await between the last `take_early` and this call. Without `is_chunked`
        (HTTP/1.0), chunks are written without size lines, and the closed connection ends the body.
        """
        assert not self._early, "chunks would be sent out of order"
        self._early = None
        self._transport = transport
        write = transport.write
        if self._interval_s:
            self._interval = IntervalWriter(write, self._interval_s, self._flush_interval)
            write = self._interval.write
        self._write = write if is_chunked else _without_frames(write)

    def stop_writing(self) -> bytes:
        """Return unsent bytes, and write nothing to the transport from now on.

        The reason is that the connection may already carry the next response.
        """
        if self._interval is not None:
            interval, self._interval = self._interval, None
            interval.close()
        unsent = self._take_rest()
        self._early = []
        return unsent

    def _flush_interval(self) -> None:
        if self._interval is None:
            return
        try:
            self._interval.flush()
        except RuntimeError:
            self._end_closed()

    def last_chunks(self, reason: str) -> bytes:
        """Return the last chunks: the text that was held back, and the finish reason."""
        delta, entries = self.held_back()
        held = self._take_rest()
        if delta.content or delta.reasoning or delta.calls or entries:
            held += self._chunk(delta, entries)
        found = None if self.guard is None else self.guard.annotations()
        return held + annotated(self.chunks.finish(reason), found)


@lru_cache(maxsize=8)
def _framed(tail: bytes) -> bytes:
    """Return the end of a frame, cached because all streams of an endpoint share it."""
    return tail + b"\r\n"


def _without_frames(write: Callable[[bytes], None]) -> Callable[[bytes], None]:
    return lambda chunk: write(chunk[chunk.index(b"\r\n") + 2 : -2])
