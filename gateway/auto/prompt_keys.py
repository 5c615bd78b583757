"""Keys of prompts and of their beginnings, by which a continued conversation is recognized. Pure.

Each turn of a conversation begins with the messages of the last turn, and so has their keys too.
Gateways share the keys. Without the installation's secret, a key reveals no text.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import NamedTuple
from zlib import crc32

_KEY_BYTES = 12
# Maximum number of a prompt's beginnings with keys. A turn of a conversation adds two or three
# messages, so the beginnings include those of the last turns.
_BEGINNINGS_MAX = 32
# A beginning's key is computed from its length and this many of its first and last texts. So a key
# costs the same for a conversation of any length.
_FIRST, _LAST = 8, 16
_WHOLE = 64  # length in characters up to which all of a text is hashed
_END = _WHOLE // 2
_SUM_BYTES = 4


class PromptKeys(NamedTuple):
    """The keys of a prompt.

    Attributes:
        session: Key of the prompt's session, or empty without a session. The key stays the same if
            the client rewrites the conversation.
        beginnings: Keys of the prompt's longest beginnings, the shortest first. The last key is
            that of the whole prompt.
    """

    session: bytes
    beginnings: Sequence[bytes]

    @property
    def longest_first(self) -> list[bytes]:
        """All keys, in the order in which a cached prefix is searched for."""
        return [*reversed(self.beginnings), *filter(None, [self.session])]

    @property
    def whole(self) -> list[bytes]:
        """The keys under which the whole prompt is recorded."""
        return [*self.beginnings[-1:], *filter(None, [self.session])]


class PromptHasher:
    """Computes keys with the installation's secret, which has at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._begun = blake2b(digest_size=_KEY_BYTES, key=secret)

    def keys(self, tenant_id: str, session: str, texts: Sequence[str]) -> PromptKeys:
        """Return the keys of a tenant's prompt. `session` may be empty."""
        of_tenant, of_session = _parts([tenant_id, f"session {session}"])
        begun = self._begun.copy()
        begun.update(_bytes(of_tenant))
        session_key = b""
        if session:
            begun_session = begun.copy()
            begun_session.update(_bytes(of_session))
            session_key = begun_session.digest()
        return PromptKeys(session_key, _beginnings(begun, texts))


def _beginnings(begun: blake2b, texts: Sequence[str]) -> list[bytes]:
    """Return the keys of the longest beginnings, each computed only from the beginning's texts."""
    count = len(texts)
    since = max(0, count - _BEGINNINGS_MAX - _LAST)
    sums = _sums(texts[since:])
    first = _sums(texts[:_FIRST]) if since else sums[: _FIRST * _SUM_BYTES]
    begun_first = begun.copy()
    begun_first.update(first)
    found = list[bytes]()
    for end in range(max(1, count - _BEGINNINGS_MAX + 1), count + 1):
        key = begun_first.copy() if end >= _FIRST else begun.copy()
        last = end - _LAST - since if end - since > _LAST else 0
        key.update(b"%b %d" % (sums[last * _SUM_BYTES : (end - since) * _SUM_BYTES], end))
        found.append(key.digest())
    return found


def _sums(texts: Sequence[str]) -> bytes:
    """Return the checksums of texts, so that a key costs the same for texts of any length.

    Checksums are not secret. Only the keys computed from them depend on the installation's secret.
    """
    return pack(f"<{len(texts)}I", *[crc32(_bytes(it)) for it in _parts(texts)])


def _parts(texts: Sequence[str]) -> list[str]:
    """Return the parts of texts from which checksums are computed.

    For a long text, these are its length and both ends. A wrong match is rare and costs little.
    """
    return [
        f"{text}\0" if len(text) <= _WHOLE else f"{len(text)} {text[:_END]}{text[-_END:]}\0"
        for text in texts
    ]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
