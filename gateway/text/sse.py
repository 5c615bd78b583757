"""Builds the bytes of a streamed completion. The part that all chunks share is built once.

Pure. A stream of 100 tokens has 100 chunks that differ only in the text. A chunk therefore consists
of two constant pieces around an escaped fragment of text.
"""

from collections.abc import Callable
from typing import Protocol

import orjson

from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.text.detokenizer import json_fragment

DONE = b"data: [DONE]\n\n"
_CHOICE_END = b"}]}\n\n"
_NO_USAGE = b'"usage":null,'
_CHAT_TEXT, _TEXT = b'"delta":{"content":"', b'"text":"'
# An SSE comment, which clients skip, and which prevents proxies from closing a silent stream.
KEEP_ALIVE = b": keep-alive\n\n"


class StreamHead:
    """The beginning that all chunks of a completion share.

    Attributes:
        opening: Bytes from the start of a chunk to the place of its usage.
        usage: Bytes at that place in every chunk but the last.
    """

    __slots__ = ("opening", "usage")

    def __init__(
        self,
        kind: str,
        completion_id: str,
        model: str,
        created_unix_s: int,
        *,
        fingerprint: str = "",
        service_tier: str = "",
        with_usage: bool = False,
    ) -> None:
        """The arguments are the same for all chunks of a stream.

        Args:
            kind: OpenAI's name of the object.
            completion_id: Id of the completion.
            model: Name of the model that answers.
            created_unix_s: Time of the request's arrival.
            fingerprint: Fingerprint of the weights that answer, which is omitted if empty.
            service_tier: Service tier, sent if the caller requested one.
            with_usage: Whether every chunk but the last has `"usage":null`, as OpenAI's do.
        """
        extra = "" if not fingerprint else f'"system_fingerprint":"{fingerprint}",'
        extra += "" if not service_tier else f'"service_tier":"{service_tier}",'
        self.opening = b'data: {"id":"%b","object":"%b","created":%d,"model":"%b",%b' % (
            json_fragment(completion_id),
            kind.encode(),
            created_unix_s,
            json_fragment(model),
            extra.encode(),
        )
        self.usage = _NO_USAGE if with_usage else b""

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        """Return the last chunk, which has the usage and an empty list of choices."""
        return self.opening + b'"choices":[],"usage":%b}\n\n' % orjson.dumps(usage)

    def prompt_chunk(self, found: list[dict[str, object]]) -> bytes:
        """Return the first chunk, which has the matches of the tenant's rules in the prompts.

        Its list of choices is empty.
        """
        results = orjson.dumps(found)
        return self.opening + b'%b"choices":[],"prompt_filter_results":%b}\n\n' % (
            self.usage,
            results,
        )


def annotated(chunk: bytes, found: dict[str, object] | None) -> bytes:
    """Return the last chunk of a choice, with matches of the tenant's rules if there are any."""
    if found is None or not chunk.endswith(_CHOICE_END):
        return chunk
    return b'%b,"content_filter_results":%b%b' % (
        chunk.removesuffix(_CHOICE_END),
        orjson.dumps(found),
        _CHOICE_END,
    )


class ChunkWriter(Protocol):
    """Writes the chunks of one choice."""

    @property
    def head(self) -> bytes:
        """Bytes before the text of a chunk that contains only text."""
        ...

    @property
    def tail(self) -> bytes:
        """Bytes after the text of a chunk that contains only text."""
        ...

    def first(self) -> bytes:
        """Return the chunks before all text, which may be empty."""
        ...

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None) -> bytes:
        """Return a chunk of a delta."""
        ...

    def finish(self, reason: str) -> bytes:
        """Return the chunk with the finish reason."""
        ...


class CountedChunks:
    """Chunks of one choice that each report the usage so far, as vLLM's do."""

    __slots__ = ("_chunks", "_opening", "_output_tokens", "_prompt_tokens")

    def __init__(
        self,
        chunks: ChunkWriter,
        head: StreamHead,
        prompt_tokens: int,
        output_tokens: Callable[[], int],
    ) -> None:
        """Each chunk has the usage so far in place of the constant usage of `head`.

        Args:
            chunks: Writer of the choice's chunks, with `head`.
            head: Head of the chunks, whose usage is replaced.
            prompt_tokens: Tokens of the choice's prompt.
            output_tokens: Returns the number of the choice's tokens so far.
        """
        self._chunks = chunks
        self._opening = head.opening + head.usage
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens

    @property
    def head(self) -> bytes:
        """Bytes before the text of a chunk."""
        return self._counted(self._chunks.head)

    @property
    def tail(self) -> bytes:
        """Bytes after the text of a chunk."""
        return self._chunks.tail

    def first(self) -> bytes:
        """Return the chunks before all text."""
        return self._counted(self._chunks.first())

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None) -> bytes:
        """Return a chunk of a delta."""
        return self._counted(self._chunks.delta(delta, logprobs))

    def finish(self, reason: str) -> bytes:
        """Return the chunk with the finish reason."""
        return self._counted(self._chunks.finish(reason))

    def _counted(self, chunk: bytes) -> bytes:
        if not chunk:
            return chunk
        prompt, output = self._prompt_tokens, self._output_tokens()
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d},' % (
            prompt,
            output,
            prompt + output,
        )
        return self._opening.removesuffix(_NO_USAGE) + usage + chunk.removeprefix(self._opening)


class ChatChunks:
    """Chunks of one choice of a chat completion."""

    __slots__ = ("head",)

    tail = b'"},"finish_reason":null}]}\n\n'

    def __init__(self, head: StreamHead, index: int = 0) -> None:
        """`index` is the index of the choice."""
        self.head = b'%b%b"choices":[{"index":%d,%b' % (
            head.opening,
            head.usage,
            index,
            _CHAT_TEXT,
        )

    def first(self) -> bytes:
        """Return the chunk that names the role."""
        return self._chunk(b'{"role":"assistant","content":""}')

    def opened(self, fields: dict[str, object]) -> bytes:
        """Return the chunk that names the role, with further fields of the message."""
        return self._chunk(orjson.dumps({"role": "assistant", "content": "", **fields}))

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return a chunk with content, reasoning, pieces of calls, and log probabilities."""
        fields: dict[str, object] = {}
        if delta.content or logprobs is not None:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            fields["tool_calls"] = [_call(call) for call in delta.calls]
        extra = b"" if logprobs is None else b'"logprobs":%b,' % orjson.dumps(logprobs)
        return self._chunk(orjson.dumps(fields), extra)

    def finish(self, reason: str) -> bytes:
        """Return the chunk with the finish reason."""
        return self._chunk(b"{}", b"", b'"%b"' % reason.encode())

    def _chunk(self, delta: bytes, extra: bytes = b"", reason: bytes = b"null") -> bytes:
        # computed on demand, because a cached copy would use memory in each stream
        opening = self.head.removesuffix(_CHAT_TEXT)
        return opening + b'"delta":%b,%b"finish_reason":%b}]}\n\n' % (delta, extra, reason)


class TextChunks:
    """Chunks of one choice of a text completion."""

    __slots__ = ("_prefix", "head")

    tail = b'","logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(self, head: StreamHead, index: int = 0, prefix: str = "") -> None:
        """The `prefix` is text before the model's own text, such as an echoed prompt."""
        self._prefix = prefix
        self.head = b'%b%b"choices":[{"index":%d,%b' % (head.opening, head.usage, index, _TEXT)

    def first(self) -> bytes:
        """Return the chunk with the echoed prompt, or no bytes without an echo."""
        return self._chunk(self._prefix) if self._prefix else b""

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return a chunk with text and log probabilities."""
        return self._chunk(delta.content, logprobs)

    def finish(self, reason: str) -> bytes:
        """Return the chunk with the finish reason."""
        return self._chunk("", None, b'"%b"' % reason.encode())

    def _chunk(
        self, text: str, logprobs: dict[str, object] | None = None, reason: bytes = b"null"
    ) -> bytes:
        opening = self.head.removesuffix(_TEXT)
        return opening + b'"text":"%b","logprobs":%b,"finish_reason":%b}]}\n\n' % (
            json_fragment(text),
            orjson.dumps(logprobs),
            reason,
        )


def _call(call: CallDelta) -> dict[str, object]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def error_event(body: bytes) -> bytes:
    """Return the event that ends a failed stream, with the error envelope `body` as JSON.

    OpenAI's SDKs raise APIError for data with an `error` object. No `[DONE]` follows.
    """
    return b"data: " + body + b"\n\n"
