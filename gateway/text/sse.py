"""Bytes of a streamed chat completion: everything that is the same for all chunks is built once.

Pure. A stream of 100 tokens has 100 chunks that differ only in the text, so that a chunk is two
constant pieces around an escaped fragment.
"""

import orjson

from gateway.text.detokenizer import json_fragment

DONE = b"data: [DONE]\n\n"
TAIL = b'"},"finish_reason":null}]}\n\n'


class ChunkWriter:
    """Writes the chunks of one completion.

    Attributes:
        head: What stands before the text of a content chunk; after it comes `tail`.
        tail: What stands after.
    """

    __slots__ = ("_opening", "_usage", "head", "tail")

    def __init__(self, completion_id: str, model: str, created_unix_s: int, usage: bool) -> None:
        """Prepare; with `usage`, every chunk but the last says `"usage":null`, as OpenAI's do."""
        self._opening = (
            b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":"%b",'
            % (json_fragment(completion_id), created_unix_s, json_fragment(model))
        )
        self._usage = b'"usage":null,' if usage else b""
        self.head = self._opening + self._usage + b'"choices":[{"index":0,"delta":{"content":"'
        self.tail = TAIL

    def role(self) -> bytes:
        """Return the first chunk."""
        return self._choice(b'{"role":"assistant","content":""}', b"null")

    def content(self, fragment: bytes) -> bytes:
        """Return a chunk with text; `fragment` is escaped for JSON."""
        return self.head + fragment + TAIL

    def tool_calls(self, calls: list[dict[str, object]]) -> bytes:
        """Return a chunk with whole tool calls."""
        return self._choice(b'{"tool_calls":%b}' % orjson.dumps(calls), b"null")

    def finish(self, reason: str) -> bytes:
        """Return the chunk that says why the text ended."""
        return self._choice(b"{}", b'"%b"' % reason.encode())

    def usage(self, usage: dict[str, object]) -> bytes:
        """Return the last chunk, with what was used and no choice."""
        return self._opening + b'"choices":[],"usage":%b}\n\n' % orjson.dumps(usage)

    def _choice(self, delta: bytes, reason: bytes) -> bytes:
        return (
            self._opening
            + self._usage
            + (b'"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (delta, reason))
        )


def error_event(body: bytes) -> bytes:
    """Return the event that ends a failed stream; `body` is the error envelope as JSON.

    OpenAI's SDKs raise APIError for data with an `error` object; no `[DONE]` follows.
    """
    return b"data: " + body + b"\n\n"
