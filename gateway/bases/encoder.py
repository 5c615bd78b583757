"""Encodes prompts to token ids. Text that a conversation repeats in every turn is cached.

Special tokens cut a prompt into segments (a system prompt, a role, a turn) that the tokenizer
processes independently. The ids of segments are cached, so that a turn costs only its new text.
Each tenant and model has a separate cache. Otherwise the time to encode a prompt would reveal
whether another tenant has sent the same text.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.bases.slices import SlicingTokenizer, Steps

# Maximum number of characters in the cache. One character needs two bytes with its token ids.
_CHARACTERS_MAX = 8 << 20
_SEGMENT_MAX = 1 << 20

# Components of a tokenizer that process a segment regardless of the text before the segment.
_INDEPENDENT = frozenset(
    {
        *("Sequence", "ByteLevel", "Split", "Digits"),
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"),
    }
)


class PromptEncoder:
    """Encodes prompts of one base. Safe for concurrent threads."""

    def __init__(self, tokenizer: Tokenizer, characters_max: int = _CHARACTERS_MAX) -> None:
        """Start with an empty cache.

        Args:
            tokenizer: Tokenizer of the base. If a text can change the ids of the following text,
                nothing is cached.
            characters_max: Bound on the characters of all cached segments together.
        """
        self._slicing = SlicingTokenizer(tokenizer)
        self._cuts = {text: array("I", (token,)) for text, token in cuts_of(tokenizer).items()}
        words = "|".join(map(re.escape, sorted(self._cuts, key=len, reverse=True)))
        self._split = re.compile(f"({words})").split
        self._characters_max = characters_max
        self._cache: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self.characters = 0

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

    def _find(self, owner: bytes, segments: Sequence[str]) -> "list[array[int] | None]":
        cuts, kept = self._cuts, self._cache
        found: list[array[int] | None] = []
        with self._lock:
            for segment in segments:
                ids = cuts.get(segment)
                if ids is None:
                    ids = kept.get((owner, segment))
                    if ids is not None:
                        kept.move_to_end((owner, segment))
                found.append(ids)
        return found

    def _keep(self, owner: bytes, segment: str, ids: "array[int]") -> None:
        if len(segment) > min(_SEGMENT_MAX, self._characters_max):
            return
        with self._lock:
            if (owner, segment) not in self._cache:
                self.characters += len(segment)
            self._cache[owner, segment] = ids
            while self.characters > self._characters_max:
                (_, oldest), _ = self._cache.popitem(last=False)
                self.characters -= len(oldest)


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
