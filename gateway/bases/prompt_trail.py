"""Prompts stored turn by turn, so that any gateway can extend a conversation's prompt. Pure.

Each turn stores only the token ids and block hashes that it has added to the earlier turns. Hashes
are chained, so that an equal hash implies equal ids before it. A digest of template, tokenizer,
model, tools, options and messages identifies the prompt. If the digest differs, the prompt is
rendered anew.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.message import DecodeError

from sluice.hashing import BLOCK_TOKENS, HASH_BYTES
from sluice.wire.router.v1 import router_pb2 as router
from sluice.wire.state.v1 import state_pb2 as wire

_DIGEST_BYTES = 16
# Maximum number of bytes stored per turn. A larger turn stores nothing, so that other gateways must
# render its prompt anew.
_RECORD_BYTES_MAX = 1 << 20
_TAIL_MAX = 4096  # maximum number of characters of `tail` in a record


@dataclass(frozen=True, slots=True)
class PromptTrail:
    """The prompt that the turns of a conversation have stored.

    Attributes:
        latest: Record of the last turn that has stored one, or None if no turn has.
        opening: Text before the first message.
        hashes: Hashes of all full blocks.
        packed: Ids of these blocks in stored form.
    """

    latest: wire.StoredPrompt | None = None
    opening: str = ""
    hashes: bytes = b""
    packed: bytes = b""

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.hashes) + len(self.packed) + len(self.opening)

    def extended(self, records: Iterable[bytes]) -> "PromptTrail":
        """Return the trail extended by the records of further turns, the oldest record first.

        A record is ignored if it is empty, because its turn stored nothing, or if it does not
        continue the trail.
        """
        latest, opening, last = self.latest, self.opening, self.hashes[-HASH_BYTES:]
        hashes, packed = [self.hashes], [self.packed]
        for data in records:
            record = _read(data)
            if record is None:
                continue
            if not record.after:
                opening, hashes, packed = record.opening, [], []
            elif record.after != last:
                continue
            latest = record
            hashes.append(record.hashes)
            packed.append(record.packed)
            last = record.hashes[-HASH_BYTES:] or record.after
        return PromptTrail(latest, opening, b"".join(hashes), b"".join(packed))

    def ids(self) -> "array[int]":
        """Return all stored ids."""
        assert self.latest is not None, "there is a record"
        # from a list, twice as fast as from the message's own container
        ids = array("I", router.Submit.FromString(self.packed).prompt[:])
        ids.extend(self.latest.rest)
        return ids


NO_TRAIL = PromptTrail()


class SaidDigest:
    """Computes a digest of rendered messages, one message at a time. Empty means no digest."""

    def __init__(self, fingerprint: bytes) -> None:
        """Start every digest from `fingerprint`, which identifies template and tokenizer."""
        self._fingerprint = fingerprint

    def begin(
        self, root: bytes, tools: Sequence[Mapping[str, Any]], options: Mapping[str, object]
    ) -> bytes:
        """Return the digest before any message. `root` identifies model and tenant."""
        return _chained(self._fingerprint + root, [{"tools": tools, "options": dict(options)}])

    @staticmethod
    def go_on(digest: bytes, rows: Iterable[Mapping[str, Any]]) -> bytes:
        """Return the digest extended by further messages, given as dicts for templates."""
        return _chained(digest, rows) if digest else b""


def record_of(
    trail: PromptTrail,
    *,
    said: bytes,
    messages: int,
    opening: str,
    ids: "array[int]",
    hashes: bytes,
    tail: str,
    ending: str,
    characters: int,
    given: int,
) -> bytes:
    """Return the record that a turn stores of its prompt, or empty if it stores nothing.

    Args:
        trail: Prompt that earlier turns have stored.
        said: Digest of all messages.
        messages: Number of messages.
        opening: Text before the first message.
        ids: Ids of the text before `tail`.
        hashes: Hashes of the full blocks of `ids`.
        tail: Text after `ids`, whose tokens may change if text follows.
        ending: Last characters of the whole text.
        characters: Number of characters of the whole text.
        given: Number of characters of all texts that the template received.
    """
    if not said or len(tail) > _TAIL_MAX:
        return b""
    known = len(trail.hashes)
    is_further = bool(known) and hashes[:known] == trail.hashes and opening == trail.opening
    start = known if is_further else 0
    end = len(hashes) // HASH_BYTES * BLOCK_TOKENS
    record = wire.StoredPrompt(
        said=said,
        messages=messages,
        after=trail.hashes[-HASH_BYTES:] if is_further else b"",
        hashes=hashes[start:],
        packed=_packed(ids[start // HASH_BYTES * BLOCK_TOKENS : end]),
        rest=ids[end:],
        opening="" if is_further else opening,
        tail=tail,
        ending=ending,
        characters=characters,
        given=given,
    )
    data = record.SerializeToString()
    return data if len(data) <= _RECORD_BYTES_MAX else b""


def _packed(ids: "array[int]") -> bytes:
    """Return ids in stored form: a serialized `Submit`. The forms of turns are concatenated."""
    return router.Submit(prompt=ids).SerializeToString()


def _read(data: bytes) -> wire.StoredPrompt | None:
    if not data:
        return None
    try:
        return wire.StoredPrompt.FromString(data)
    except DecodeError:  # a gateway of another version has stored the record
        return None


def _chained(digest: bytes, parts: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a digest extended by further parts, or empty if a part is not valid as JSON."""
    for part in parts:
        try:
            text = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
        except TypeError:
            return b""
        digest = hashlib.blake2b(text, key=digest[:64], digest_size=_DIGEST_BYTES).digest()
    return digest
