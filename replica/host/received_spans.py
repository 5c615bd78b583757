"""Keeps the ids and block hashes of earlier prompts, so that routers need to send new ids only.

A conversation's next prompt begins with the previous one. A router names the last of the spans that
the engine has received, and sends the ids after it. So the ids of the history are neither sent nor
hashed again. All hashes are the engine's own, so no hash is trusted from another process.
"""

from array import array
from collections import OrderedDict
from itertools import chain
from typing import NamedTuple

from sluice.hashing import BLOCK_TOKENS, block_hashes
from sluice.prompt_spans import SPAN_BLOCKS, SPAN_TOKENS


class UnknownSpanError(Exception):
    """The engine lacks a span that a router has named, so the whole prompt must be sent."""


class ReceivedPrompt(NamedTuple):
    """A prompt's ids, and the hashes of its full blocks."""

    ids: "array[int]"
    hashes: list[bytes]


class _Span(NamedTuple):
    """A span: the name of the span before it or the root of the chain, its ids and its hashes."""

    before: bytes
    ids: bytes
    hashes: list[bytes]


class ReceivedSpans:
    """The spans of the latest prompts, with together at most as many blocks as the KV pool."""

    def __init__(self, blocks: int) -> None:
        """Keep the spans of at most `blocks` blocks."""
        self._count_max = blocks // SPAN_BLOCKS
        # Spans by the hash of their last block. The least recently used span is the first.
        self._spans: OrderedDict[bytes, _Span] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spans)

    def read(
        self, ids: "array[int]", root: bytes, known: bytes, known_tokens: int
    ) -> ReceivedPrompt:
        """Return a prompt whose first ids are those of known spans, and keep its further spans.

        Args:
            ids: The ids after the known spans.
            root: Root of the chain of block hashes.
            known: Name of the last known span, or empty if `ids` is the whole prompt.
            known_tokens: Number of tokens of all known spans.

        Raises:
            UnknownSpanError: A span is missing, or the chain of spans has another root or length.
        """
        spans = self._chain(root, known, known_tokens)
        hashes = list(chain.from_iterable([span.hashes for span in spans]))
        if spans:
            whole = array("I", b"".join([span.ids for span in spans]))
            whole.extend(ids)
            ids = whole
        hashes = block_hashes(ids, root, len(ids) // BLOCK_TOKENS, hashes)
        self._keep(ids, root, hashes)
        return ReceivedPrompt(ids, hashes)

    def _chain(self, root: bytes, known: bytes, known_tokens: int) -> list[_Span]:
        """Return the spans up to the known one, in order."""
        spans: list[_Span] = []
        name = known or root
        while name != root:
            span = self._spans.get(name)
            if span is None or len(spans) * SPAN_TOKENS >= known_tokens:
                raise UnknownSpanError
            spans.append(span)
            name = span.before
        if len(spans) * SPAN_TOKENS != known_tokens:
            raise UnknownSpanError
        spans.reverse()
        return spans

    def _keep(self, ids: "array[int]", root: bytes, hashes: list[bytes]) -> None:
        """Make the spans of a prompt the most recently used ones."""
        count = min(len(hashes) // SPAN_BLOCKS, self._count_max)
        # The end of a prompt is dropped before its beginning, without which the end is useless.
        for index in reversed(range(count)):
            first = index * SPAN_BLOCKS
            name = hashes[first + SPAN_BLOCKS - 1]
            if name not in self._spans:
                of_span = ids[index * SPAN_TOKENS : (index + 1) * SPAN_TOKENS].tobytes()
                before = hashes[first - 1] if index else root
                self._spans[name] = _Span(before, of_span, hashes[first : first + SPAN_BLOCKS])
            self._spans.move_to_end(name)
        while len(self._spans) > self._count_max:
            self._spans.popitem(last=False)
