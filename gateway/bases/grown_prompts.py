"""Caches the prompts of conversations as text, token ids and block hashes.

A session's next prompt begins with the whole previous prompt. If the template renders each message
independently, only the new messages are processed. Otherwise the whole prompt is processed. A
cached prompt is identified by tenant, model and session, and used only if the new messages begin
with the messages of the cached prompt.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from gateway.bases.encoder import PromptEncoder
from gateway.bases.prompt_trail import PromptTrail, SaidDigest, record_of
from gateway.bases.slices import Steps
from gateway.bases.spans import PromptSpans
from gateway.bases.templates import WrittenChat
from gateway.bodies.messages import Message
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES, chained_hashes

if TYPE_CHECKING:
    from array import array

_BYTES_MAX = 64 << 20  # bytes of all cached prompts, about two hundred prompts of 50,000 tokens
_SHARE_MAX = 4  # a prompt may use at most the cache's size divided by this number
IDLE_S = 3600.0  # seconds after which a prompt that no turn has continued is dropped
_MESSAGE_BYTES = 1024  # estimated memory of a message in bytes, in addition to its text
ENDING_CHARACTERS = 64


class PromptPlace(NamedTuple):
    """The key of a cached prompt: tenant, root of the model's hash chain, and session."""

    owner: str
    root: bytes
    session: str


class GrownPrompt(NamedTuple):
    """A cached prompt without its last message, whose text may depend on the next message.

    Attributes:
        chat: The rendered conversation without the texts of its messages.
        ids: Token ids of the text before `tail`.
        tail: Text from the last special token on, whose tokens may change if text follows.
        ending: The last `ENDING_CHARACTERS` characters of the text.
        characters: Number of characters of the text.
        hashes: Hashes of the full blocks of `ids`.
        said: Digest of the rendered messages (see `SaidDigest`), or empty without a digest.
    """

    chat: WrittenChat
    ids: "array[int]"
    tail: str
    ending: str
    characters: int
    hashes: bytes
    said: bytes = b""

    def begins(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begin with the messages of this prompt."""
        own = self.chat.messages
        return list(messages[: len(own)]) == own

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        made = 4 * len(self.ids) + len(self.hashes)
        return made + self.chat.given + _MESSAGE_BYTES * len(self.chat.messages)


class PromptTokens(NamedTuple):
    """The tokens of a whole prompt.

    Attributes:
        ids: All token ids.
        hashes: Hashes of the full blocks of `ids`.
        record: Part of the prompt that the turn stores (see `PromptTrail`), or empty if none.
    """

    ids: "array[int]"
    hashes: bytes
    record: bytes = b""


class GrownPrompts:
    """The cached prompts of one base. Its methods may be called from several threads."""

    def __init__(
        self,
        encoder: PromptEncoder,
        spans: PromptSpans,
        bytes_max: int = _BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
        fingerprint: bytes = b"",
    ) -> None:
        """Start with an empty cache. `fingerprint` identifies template and tokenizer."""
        self._encoder, self._spans, self._bytes_max = encoder, spans, bytes_max
        self._clock, self._digest = clock, SaidDigest(fingerprint)
        # Cached prompts with the times of their last use, the least recently used prompt first.
        self._prompts: OrderedDict[PromptPlace, tuple[GrownPrompt, float]] = OrderedDict()
        self._lock = Lock()
        self.held_bytes = 0

    def find(self, place: PromptPlace, messages: Sequence[Message]) -> GrownPrompt | None:
        """Return the cached prompt of a key if `messages` begin with the prompt's messages."""
        if not place.session:
            return None
        with self._lock:
            if place not in self._prompts:
                return None
            known, _ = self._prompts[place]
            if not known.begins(messages):
                return None
            self._prompts[place] = known, self._clock()
            self._prompts.move_to_end(place)
            return known

    def restored(
        self, place: PromptPlace, trail: PromptTrail, chat: WrittenChat
    ) -> GrownPrompt | None:
        """Return the prompt that earlier turns have stored, or None if its messages differ.

        Args:
            place: Key of the prompt.
            trail: The stored prompt.
            chat: The request's first messages, which the stored prompt should contain.
        """
        latest = trail.latest
        assert latest is not None, "there is a record"
        said = self._said(place, None, chat)
        if not said or said != latest.said:
            return None
        return GrownPrompt(
            chat,
            trail.ids(),
            latest.tail,
            latest.ending,
            latest.characters,
            trail.hashes,
            said,
        )

    def forget_idle(self) -> None:
        """Drop prompts that no turn has continued for `IDLE_S`."""
        with self._lock:
            before_s = self._clock() - IDLE_S
            while self._prompts and next(iter(self._prompts.values()))[1] <= before_s:
                self._drop_oldest()

    def can_keep(self, place: PromptPlace, chat: WrittenChat | None) -> bool:
        """Return whether caching the prompt would save work in the conversation's next turn."""
        has_turns = chat is not None and len(chat.messages) > 1
        return has_turns and bool(place.session) and self._encoder.can_cut

    def encode(
        self,
        place: PromptPlace,
        chat: WrittenChat,
        known: GrownPrompt | None,
        tokenizing: Executor | None,
        trail: PromptTrail | None = None,
    ) -> Steps[PromptTokens]:
        """Return the tokens of a conversation that extends the cached `known`, and cache them.

        `known` is None for a new conversation. With a `trail`, which earlier turns have stored, the
        result includes the record by which this turn extends the trail.
        """
        encoder, root = self._encoder, place.root
        before = chat.before if known is None else known.tail
        more = before + "".join(chat.texts[:-1])
        stable, tail = encoder.cut(more)
        ids = yield from encoder.encode_segments(stable, root, tokenizing)
        last = encoder.segments([tail + chat.texts[-1] + chat.behind])
        rest = yield from encoder.encode_segments(last, root, tokenizing)
        if known is not None:
            ids = known.ids + ids
        whole = ids + rest
        end = len(ids) - len(ids) % BLOCK_TOKENS
        hashes = self._of_blocks(known, whole[:end], root)
        grown = GrownPrompt(
            chat._replace(messages=list(chat.messages), texts=(), behind=""),
            ids,
            tail,
            more[-ENDING_CHARACTERS:],
            (0 if known is None else known.characters - len(known.tail)) + len(more),
            hashes,
            self._said(place, known, chat),
        )
        self._keep(place, grown)
        record = b"" if trail is None else _record_of(grown, trail)
        behind = whole[end:]
        hashes += chained_hashes(behind, hashes[-HASH_BYTES:] or root)
        return PromptTokens(whole, hashes, record)

    def _said(self, place: PromptPlace, known: GrownPrompt | None, chat: WrittenChat) -> bytes:
        """Return the digest of all messages, which extends the digest of `known` if it is set."""
        if known is None:
            begun = self._digest.begin(place.root, chat.tools, chat.options)
            return self._digest.go_on(begun, chat.rows)
        return self._digest.go_on(known.said, chat.rows[len(known.chat.messages) :])

    def _of_blocks(self, known: GrownPrompt | None, ids: "array[int]", root: bytes) -> bytes:
        """Return the hashes of full blocks, reusing those of the cached `known`."""
        if known is None or not known.hashes:
            return self._spans.hashed(ids, root)
        start = len(known.hashes) // HASH_BYTES * BLOCK_TOKENS
        return known.hashes + chained_hashes(ids[start:], known.hashes[-HASH_BYTES:])

    def _keep(self, place: PromptPlace, grown: GrownPrompt) -> None:
        with self._lock:
            before, _ = self._prompts.pop(place, (None, 0.0))
            if before is not None:
                self.held_bytes -= before.size
            if grown.size > self._bytes_max // _SHARE_MAX:
                return
            self._prompts[place] = grown, self._clock()
            self.held_bytes += grown.size
            while self.held_bytes > self._bytes_max:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (oldest, _) = self._prompts.popitem(last=False)
        self.held_bytes -= oldest.size


def _record_of(grown: GrownPrompt, trail: PromptTrail) -> bytes:
    chat = grown.chat
    return record_of(
        trail,
        said=grown.said,
        messages=len(chat.messages),
        opening=chat.before,
        ids=grown.ids,
        hashes=grown.hashes,
        tail=grown.tail,
        ending=grown.ending,
        characters=grown.characters,
        given=chat.given,
    )
