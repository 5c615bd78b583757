"""Decodes token ids to text incrementally, in pieces that join to the whole text. Pure.

The output never contains half a character. Bytes that may still become a character wait for the
next token. Most tokens consist of whole characters and need no `TextStream`. Streams then copy the
token's text from `TokenTable.fragments`, where it is already escaped for JSON.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson
from tokenizers import Tokenizer

# Tokens for which a trailing replacement character is withheld, because it may be the beginning of
# a real character. A character has at most four bytes and so at most three further tokens.
_BEGUN_TOKENS_MAX = 3
_HOLDS_MAX = 8
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for one byte, perhaps a part of a character


class TextStream(Protocol):
    """The text of one sequence of tokens."""

    @property
    def is_pending(self) -> bool:
        """Whether the text of the next token depends on the tokens before."""
        ...

    def push(self, tokens: Sequence[int]) -> str:
        """Add the next tokens, and return the text that they complete, which may be empty."""
        ...

    def flush(self) -> str:
        """End the stream, and return the withheld text. Broken characters become U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The texts of one tokenizer's ids.

    Attributes:
        fragments: By token id, the token's text escaped for a JSON string, if the token consists of
            whole characters. The entry is empty for hidden tokens, and None if only a `TextStream`
            can decode the token.
        pieces: By token id, the bytes of the token, or None without a byte-level tokenizer.
        tokenizer: Tokenizer, used when `pieces` is None.
        hidden: Ids that are not shown, which are special tokens and end-of-sequence ids.
    """

    fragments: Sequence[bytes | None]
    pieces: Sequence[bytes] | None
    tokenizer: Tokenizer
    hidden: frozenset[int]
    # Cache by id of a token's bytes inside a text, since decoding is slow. Its bound is the
    # vocabulary.
    _inner: dict[int, bytes] = field(
        default_factory=dict[int, bytes], init=False, repr=False, compare=False
    )

    def bytes_of(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes of a token in a text, or the name of a hidden token.

        With `is_first` the token begins the text, where many decoders omit a space.
        """
        if self.pieces is not None and token not in self.hidden:
            return self.pieces[token]
        if token in self.hidden:
            return (self.tokenizer.id_to_token(token) or "").encode()
        if is_first:
            return self._decoded(token, is_first=True)
        data = self._inner.get(token)
        if data is None:
            data = self._inner[token] = self._decoded(token, is_first=False)
        return data

    def _decoded(self, token: int, *, is_first: bool) -> bytes:
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        if not is_first:  # the token's text after another token, which here is the same token
            both = self.tokenizer.decode([token, token], skip_special_tokens=False)
            text = both[len(text) :]
        name = self.tokenizer.id_to_token(token) or ""
        byte = _BYTE.fullmatch(name) if "\ufffd" in text else None
        return text.encode() if byte is None else bytes.fromhex(byte[1])

    def showing(self, tokens: Collection[int]) -> "TokenTable":
        """Return the same table with these special tokens shown as their names."""
        shown = self.hidden.intersection(tokens)
        if not shown:
            return self
        fragments = list(self.fragments)
        pieces = None if self.pieces is None else list(self.pieces)
        for token in shown:
            name = self.tokenizer.id_to_token(token) or ""
            fragments[token] = None if pieces is None else json_fragment(name)
            if pieces is not None:
                pieces[token] = name.encode()
        return TokenTable(fragments, pieces, self.tokenizer, self.hidden - shown)

    def stream(self) -> TextStream:
        """Return a new stream."""
        if self.pieces is None:
            return _DiffStream(self.tokenizer, self.hidden)
        return _ByteStream(self.pieces)


def json_fragment(text: str) -> bytes:
    """Return `text` escaped for use inside a JSON string."""
    return orjson.dumps(text)[1:-1]


def token_table(
    tokenizer: Tokenizer, end_ids: Collection[int] = (), ids_min: int = 0
) -> TokenTable:
    """Build the table of a tokenizer, in about 100 ms for a large one.

    Args:
        tokenizer: Tokenizer, whose decoder decides which kind of stream is used.
        end_ids: End-of-sequence ids, hidden besides the special tokens.
        ids_min: Least number of entries, because models may have more ids than their tokenizer
            has tokens.
    """
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    hidden = frozenset(special | set(end_ids))
    size = max(ids_min, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1))
    if not _is_byte_level(tokenizer):
        fragments = [b"" if i in hidden else None for i in range(size)]
        return TokenTable(fragments, None, tokenizer, hidden)
    pieces = [_piece(None if i in hidden else tokenizer.id_to_token(i)) for i in range(size)]
    return TokenTable([_fragment(piece) for piece in pieces], pieces, tokenizer, hidden)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    return decoder is not None and decoder.get("type") == "ByteLevel"


def _fragment(piece: bytes) -> bytes | None:
    try:
        return json_fragment(piece.decode())
    except UnicodeDecodeError:
        return None


def _byte_of_character() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers, with a printable character for each byte.

    The source is bytes_to_unicode in the GPT-2 code. Bytes that are not printable map to characters
    from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_character()


def _piece(token: str | None) -> bytes:
    """Return a token's bytes like the ByteLevel decoder, which copies unmapped characters."""
    if token is None:
        return b""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


class _ByteStream:
    """The stream of byte-level tokens, which joins bytes and cuts at whole characters."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._pending = b""

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def push(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        data = self._pending + b"".join([pieces[token] for token in tokens])
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class _DiffStream:
    """The stream of any other decoder, which returns the text that new tokens add.

    A decoder may treat a token by its neighbours (leading space, joined bytes). The latest tokens
    are therefore decoded again in front of the new ones. Some decoders rewrite a whole run of byte
    tokens when a later token is invalid. Text that was sent before cannot be corrected then.
    """

    __slots__ = ("_hidden", "_holds", "_ids", "_read", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []  # the latest ids whose text was returned, then the withheld ids
        self._read = 0  # number of leading ids in `_ids` whose text was returned
        self._holds = 0

    @property
    def is_pending(self) -> bool:
        return True

    def push(self, tokens: Sequence[int]) -> str:
        self._ids += [token for token in tokens if token not in self._hidden]
        end = len(self._ids)
        text = self._new_text(end)
        if not text:
            return ""
        if text.endswith("\ufffd"):
            text, end = self._before_begun(text)
            if not text:
                self._holds += 1
                return ""
        self._holds = 0
        del self._ids[: self._read]
        self._read = end - self._read
        return text

    def flush(self) -> str:
        text = self._new_text(len(self._ids))
        self._ids.clear()
        self._read = 0
        return text

    def _before_begun(self, text: str) -> tuple[str, int]:
        """Return the text before an unfinished character, and the number of its tokens.

        The text is all of `text` if it was withheld long enough, and empty if it must wait.
        """
        count = len(self._ids)
        for end in range(count - 1, max(self._read, count - 1 - _BEGUN_TOKENS_MAX), -1):
            before = self._new_text(end)
            if before and not before.endswith("\ufffd"):
                return before, end
        return (text if self._holds >= _HOLDS_MAX else ""), count

    def _new_text(self, end: int) -> str:
        if end <= self._read:
            return ""
        before = self._decode(self._ids[: self._read])
        return self._decode(self._ids[:end])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
