"""Computes block hashes of prompts, only once for prefixes that prompts share.

A conversation sends its whole history in every turn. Per token, hashing costs 50 ns, but finding
the token in a cached span of 4,096 tokens costs 4 ns. A span's key is a digest of the hash chain's
root and all ids up to the span's end. So no tenant or model can read a span of another.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from sluice.hashing import HASH_BYTES, chained_hashes

SPAN_TOKENS = 4096  # hashed in 0.2 ms, after which other threads can acquire the interpreter lock
_BYTES_MAX = 32 << 20  # bytes of all cached spans, about 14,000 spans of 4,096 tokens
IDLE_S = 3600.0  # seconds after which a span that no prompt has used is dropped
_DIGEST_BYTES = 16
_OVERHEAD_BYTES = 256  # estimated memory of a span in bytes, in addition to its content


if TYPE_CHECKING:
    from array import array


class PromptSpans:
    """The hashes of spans (runs of 4,096 tokens) of one base. Safe for concurrent threads."""

    def __init__(
        self, bytes_max: int = _BYTES_MAX, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with an empty cache."""
        self._bytes_max, self._clock = bytes_max, clock
        # Cached spans with the times of their last use, the least recently used span first.
        self._spans: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._lock = Lock()
        self.held_bytes = 0

    def hashed(self, ids: "array[int]", root: bytes) -> bytes:
        """Return the hashes of a prompt's full blocks, concatenated.

        Args:
            ids: Token ids.
            root: Root of the hash chain, which identifies tenant and model.
        """
        hashes = list[bytes]()
        last, data = b"", memoryview(ids)
        so_far = hashlib.blake2b(root, digest_size=_DIGEST_BYTES)
        end = len(ids) - len(ids) % SPAN_TOKENS
        for start in range(0, end, SPAN_TOKENS):
            so_far.update(data[start : start + SPAN_TOKENS])
            key = so_far.digest()
            span = self._find(key)
            if span is None:
                span = chained_hashes(ids[start : start + SPAN_TOKENS], last or root)
                self._keep(key, span)
            hashes.append(span)
            last = span[-HASH_BYTES:]
        return b"".join([*hashes, chained_hashes(ids[end:], last or root)])

    def _find(self, key: bytes) -> bytes | None:
        with self._lock:
            if key not in self._spans:
                return None
            span, _ = self._spans[key]
            self._spans[key] = span, self._clock()
            self._spans.move_to_end(key)
            return span

    def forget_idle(self) -> None:
        """Drop spans that no prompt has used for `IDLE_S`."""
        with self._lock:
            before_s = self._clock() - IDLE_S
            while self._spans and next(iter(self._spans.values()))[1] <= before_s:
                self._drop_oldest()

    def _keep(self, key: bytes, span: bytes) -> None:
        with self._lock:
            if key not in self._spans:
                self.held_bytes += _size(span)
            self._spans[key] = span, self._clock()
            self._spans.move_to_end(key)
            while self.held_bytes > self._bytes_max:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (oldest, _) = self._spans.popitem(last=False)
        self.held_bytes -= _size(oldest)


def _size(span: bytes) -> int:
    return len(span) + _OVERHEAD_BYTES
