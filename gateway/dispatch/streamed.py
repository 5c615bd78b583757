"""The hot path: from the tokens of an engine step to bytes on a socket, in one synchronous call.

Per token this may spend little more than the one `send()` that every gateway pays. So there is no
await, no task switch, no JSON encoder and no call into aiohttp: once the response is prepared and
its first chunk is out, chunks are framed here and written to the transport itself.
"""

import asyncio
from collections.abc import Callable

from gateway.dispatch.generation import Ending, EndKind, Generation, GenerationSpec
from gateway.metrics import FastHistogram
from gateway.text.detokenizer import TokenTable, json_fragment
from gateway.text.pipe import TextPipe
from gateway.text.sse import TAIL, ChunkWriter
from sluice.errors import ErrorCode

# A reader this far behind (about a thousand tokens) is cut: memory is for those who read.
BUFFER_BYTES_MAX = 256 << 10
_CHECK_EVERY = 16  # tokens between looks at the buffer
_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(4096))  # of HTTP/1.1 chunks
_TAIL_AND_CRLF = TAIL + b"\r\n"


class StreamedGeneration(Generation):
    """Writes tokens to the client as they come. Until `go_live` they are kept."""

    __slots__ = (
        "_early",
        "_fragments",
        "_frame_bytes",
        "_head",
        "_is_plain",
        "_itl",
        "_transport",
        "_until_check",
        "_write",
        "chunks",
    )

    def __init__(
        self,
        spec: GenerationSpec,
        pipe: TextPipe,
        table: TokenTable,
        chunks: ChunkWriter,
        itl: FastHistogram,
    ) -> None:
        """Prepare.

        Args:
            spec: What was asked.
            pipe: Used for what the table cannot tell.
            table: Of the base.
            chunks: Of this completion.
            itl: Told about every gap between tokens.
        """
        super().__init__(spec, pipe)
        self.chunks = chunks
        self._fragments = table.fragments
        self._itl = itl
        self._is_plain = pipe.is_transparent
        self._early: list[bytes] | None = []
        self._head = chunks.head
        self._frame_bytes = len(chunks.head) + len(TAIL)
        self._transport: asyncio.WriteTransport | None = None
        self._until_check = _CHECK_EVERY

    def push(self, tokens: list[int], now_s: float) -> None:
        """Take the tokens of one engine step and send their text."""
        if self.ending is not None:
            return
        self.emitted += tokens
        if self.is_fresh:
            self.note_time(now_s)
        else:
            gap_s = now_s - self.last_at_s
            self.last_at_s = now_s
            if gap_s > self.itl_max_s:  # noqa: PLR1730 - a call of max() costs as much as the rest
                self.itl_max_s = gap_s
            self._itl.observe(gap_s)
        fragment = self._fragments[tokens[0]] if self._is_plain and len(tokens) == 1 else None
        if fragment is None:
            self._push_slowly(tokens)
        elif fragment:
            self._send(fragment)

    def _push_slowly(self, tokens: list[int]) -> None:
        pipe = self.pipe
        text = pipe.push(tokens)
        self._is_plain = pipe.is_transparent
        if text:
            self._send(json_fragment(text))
        self._send_calls()
        if pipe.is_stopped:
            self.end(Ending(EndKind.STOP))

    def _send(self, fragment: bytes) -> None:
        if self._early is not None:
            self._early.append(self.chunks.content(fragment))
            return
        size = self._frame_bytes + len(fragment)
        line = _SIZE_LINES[size] if size < 4096 else b"%x\r\n" % size
        self._write_frame(b"".join((line, self._head, fragment, _TAIL_AND_CRLF)))
        self._until_check -= 1
        if not self._until_check:
            self._check_reader()

    def _write_frame(self, frame: bytes) -> None:
        try:
            self._write(frame)
        except RuntimeError:
            # uvloop: the connection is closed, and the handler's cancellation is on its way.
            self.end(Ending(EndKind.REFUSED, ErrorCode.CLIENT_CLOSED, "The client hung up."))

    def _send_calls(self) -> None:
        calls = [{"index": index, **call.as_dict()} for index, call in self.pipe.new_calls()]
        if calls:
            chunk = self.chunks.tool_calls(calls)
            if self._early is not None:
                self._early.append(chunk)
            else:
                self._write_frame(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def _check_reader(self) -> None:
        self._until_check = _CHECK_EVERY
        transport = self._transport
        if self.ending is not None or transport is None:
            return
        if transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            text = "The client reads too slowly; the stream was cut."
            self.end(Ending(EndKind.REFUSED, ErrorCode.SLOW_READER, text))

    def take_early(self) -> bytes:
        """Return the chunks that came before `go_live`."""
        early = b"".join(self._early or ())
        if self._early is not None:
            self._early.clear()
        return early

    def go_live(self, transport: asyncio.WriteTransport, *, is_chunked: bool) -> None:
        """Write to the transport from now on; call when the response's first chunk is out.

        Nothing may be awaited between the last `take_early` and this. Without `is_chunked`
        (HTTP/1.0) the body ends with the connection, and chunks go out without their frames.
        """
        assert not self._early, "chunks would be sent out of order"
        self._early = None
        self._transport = transport
        self._write = transport.write if is_chunked else _without_frames(transport.write)

    def last_chunks(self) -> bytes:
        """Return what is still held back when the answer ends."""
        text = self.pipe.flush()
        held = self.take_early()
        if text:
            held += self.chunks.content(json_fragment(text))
        calls = [{"index": index, **call.as_dict()} for index, call in self.pipe.new_calls()]
        return held + self.chunks.tool_calls(calls) if calls else held


def _without_frames(write: Callable[[bytes], None]) -> Callable[[bytes], None]:
    return lambda chunk: write(chunk[chunk.index(b"\r\n") + 2 : -2])
