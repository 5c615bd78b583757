"""Encodes prompts to token ids. Text that a conversation repeats in every turn is cached.

Special tokens cut a prompt into segments (a system prompt, a role, a turn) that the tokenizer
processes independently. The ids of segments are cached, so that a turn costs only its new text.
Each tenant and model has a separate cache. Otherwise the time to encode a prompt would reveal
whether another tenant has sent the same text.
"""

import json
import re
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.bases.slices import SlicingTokenizer, Steps

_BYTES_MAX = 16 << 20  # bytes of all cached segments, about 37,000 short ones or 8 MB of text
_SHARE_MAX = 8  # a segment may use at most the cache's size divided by this number
# Estimated memory of a segment in bytes, in addition to its text and its token ids. It is most of
# what a short segment uses, for example an answer of a few words.
_OVERHEAD_BYTES = 320
IDLE_S = 3600.0  # seconds after which a segment that no prompt has used is dropped

# Components of a tokenizer that process a segment regardless of the text before the segment.
_INDEPENDENT = frozenset(
    {
        *("Sequence", "ByteLevel", "Split", "Digits"),
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"),
    }
)


class PromptEncoder:
    """Encodes prompts of one base. Safe for concurrent threads.

    Attributes:
        held_bytes: Approximate bytes of all cached segments.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        bytes_max: int = _BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with an empty cache.

        Args:
            tokenizer: Tokenizer of the base. If a text can change the ids of the following text,
                nothing is cached.
            bytes_max: Bound on the memory of all cached segments together.
            clock: Clock for times of use, in seconds.
        """
        self._slicing = SlicingTokenizer(tokenizer)
        self._cuts = {text: array("I", (token,)) for text, token in cuts_of(tokenizer).items()}
        words = "|".join(map(re.escape, sorted(self._cuts, key=len, reverse=True)))
        self._split = re.compile(f"({words})").split
        self._bytes_max, self._clock = bytes_max, clock
        # Ids of segments with the times of their last use, the least recently used segment first.
        self._cache: OrderedDict[tuple[bytes, str], tuple[array[int], float]] = OrderedDict()
        self._lock = Lock()
        self.held_bytes = 0

    def encode(
        self, pieces: Sequence[str], owner: bytes, tokenizing: Executor | None = None
    ) -> "Steps[array[int]]":
        """Return the ids of a prompt, computed in steps.

        Args:
            pieces: Pieces of the prompt's text. No token spans two pieces.
            owner: Tenant and model of the prompt. Each owner has a separate cache.
            tokenizing: Threads for segments that are not cached, or None for the caller's thread.
        """
        if self._cuts:
            return (yield from self.encode_segments(self.segments(pieces), owner, tokenizing))
        joined = array("I")
        for ids in (yield from self._slicing.encode(pieces, tokenizing)):
            joined.extend(ids)
        return joined

    @property
    def can_cut(self) -> bool:
        """Whether prompts of this tokenizer can be cut into segments."""
        return bool(self._cuts)

    def segments(self, pieces: Sequence[str]) -> list[str]:
        """Return the segments of a prompt. Each special token is a segment too."""
        return [segment for piece in pieces for segment in self._split(piece) if segment]

    def cut(self, text: str) -> tuple[list[str], str]:
        """Cut a text before its last special token, and return the first part in segments.

        The second result is the rest of the text. If text is appended to `text`, the ids of the
        first result's segments stay the same.
        """
        segments = self.segments([text])
        last = max((at for at, it in enumerate(segments) if it in self._cuts), default=0)
        return segments[:last], "".join(segments[last:])

    def encode_segments(
        self, segments: Sequence[str], owner: bytes, tokenizing: Executor | None
    ) -> "Steps[array[int]]":
        """Return the ids of segments. The arguments are those of `encode`."""
        joined = array("I")
        found = self._find(owner, segments)
        missing = [segment for segment, ids in zip(segments, found, strict=True) if ids is None]
        new = iter((yield from self._slicing.encode(missing, tokenizing)))
        for segment, ids in zip(segments, found, strict=True):
            if ids is None:
                ids = next(new)  # noqa: PLW2901 - found now
                self._keep(owner, segment, ids)
            joined.extend(ids)
        return joined

    def encode_whole(self, text: str, tokenizing: Executor | None = None) -> "Steps[array[int]]":
        """Return a text's ids, including the tokens that the tokenizer adds. Nothing is cached."""
        return self._slicing.encode_whole(text, tokenizing)

    def forget_idle(self) -> None:
        """Drop segments that no prompt has used for `IDLE_S`."""
        with self._lock:
            before_s = self._clock() - IDLE_S
            while self._cache and next(iter(self._cache.values()))[1] <= before_s:
                self._drop_oldest()

    def _find(self, owner: bytes, segments: Sequence[str]) -> "list[array[int] | None]":
        cuts, kept, now_s = self._cuts, self._cache, self._clock()
        found: list[array[int] | None] = []
        with self._lock:
            for segment in segments:
                ids = cuts.get(segment)
                if ids is None and (key := (owner, segment)) in kept:
                    ids, _ = kept[key]
                    kept[key] = ids, now_s
                    kept.move_to_end(key)
                found.append(ids)
        return found

    def _keep(self, owner: bytes, segment: str, ids: "array[int]") -> None:
        size = _size(segment, ids)
        if size > self._bytes_max // _SHARE_MAX:
            return
        with self._lock:
            if (owner, segment) not in self._cache:
                self.held_bytes += size
            self._cache[owner, segment] = ids, self._clock()
            self._cache.move_to_end((owner, segment))
            while self.held_bytes > self._bytes_max:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        (_, segment), (ids, _) = self._cache.popitem(last=False)
        self.held_bytes -= _size(segment, ids)


def _size(segment: str, ids: "array[int]") -> int:
    """Return the approximate bytes of memory that a cached segment uses."""
    return _OVERHEAD_BYTES + sys.getsizeof(segment) + ids.itemsize * len(ids)


def cuts_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens at which a text may be cut, with their ids.

    Text on one side of such a token does not change the ids on its other side.
    """
    if not is_independent(tokenizer):
        return {}
    added = tokenizer.get_added_tokens_decoder()
    texts = [token.content for token in added.values()]
    return {
        token.content: i
        for i, token in added.items()
        if _is_plain(token) and _is_alone(token, texts)
    }


def is_independent(tokenizer: Tokenizer) -> bool:
    """Return whether a text has the same tokens at any position in a prompt."""
    described = json.loads(tokenizer.to_str())
    stages = (described.get("normalizer"), described.get("pre_tokenizer"))
    return all(map(_is_independent, stages)) and not described.get("truncation")


def _is_independent(stage: dict[str, Any] | None) -> bool:
    if stage is None:
        return True
    parts = [*stage.get("pretokenizers", ()), *stage.get("normalizers", ())]
    is_known = stage["type"] in _INDEPENDENT and not stage.get("add_prefix_space")
    return is_known and all(map(_is_independent, parts))


def _is_plain(token: AddedToken) -> bool:
    """Return whether a token matches exactly its text, without neighbouring white space."""
    takes_more = token.lstrip or token.rstrip or token.single_word or token.normalized
    return token.special and len(token.content) > 1 and not takes_more


def _is_alone(token: AddedToken, texts: Sequence[str]) -> bool:
    """Return whether no other added token contains `token` or overlaps its beginning."""
    text = token.content
    for other in texts:
        if other != text and (text in other or _reaches_into(other, text)):
            return False
    return True


def _reaches_into(other: str, text: str) -> bool:
    return any(text.startswith(other[start:]) for start in range(1, len(other)))
