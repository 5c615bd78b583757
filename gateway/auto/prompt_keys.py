"""Keys of prompts and of their beginnings: a turn of a conversation begins with the last. Pure.

Keys leave the process, as other gateways look prompts up by them. Without the secret of the
installation they reveal no text.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_KEY_BYTES = 12
# Beginnings that have keys: the turns of a conversation add two or three messages each.
_BEGINNINGS_MAX = 32
# Texts of a beginning that its key depends on, besides its length: the first and the last ones. So
# a key costs the same in a talk of any length.
_FIRST, _LAST = 8, 16
_WHOLE = 64  # characters of a text that is hashed as a whole
_END = _WHOLE // 2


class PromptKeys(NamedTuple):
    """The keys of a prompt.

    Attributes:
        session: Key of its session, whose history may be rewritten; empty: it has none.
        beginnings: Keys of its longest beginnings, the shortest first; the last is the whole one's.
    """

    session: bytes
    beginnings: Sequence[bytes]

    @property
    def longest_first(self) -> list[bytes]:
        """All keys, in the order in which a prompt is looked up."""
        return [*reversed(self.beginnings), *filter(None, [self.session])]

    @property
    def whole(self) -> list[bytes]:
        """The keys by which the prompt itself is known."""
        return [*self.beginnings[-1:], *filter(None, [self.session])]


class PromptHasher:
    """Makes keys with the secret of an installation, 64 bytes at most."""

    def __init__(self, secret: bytes) -> None:
        """Prepare."""
        self._begun = blake2b(digest_size=_KEY_BYTES, key=secret)

    def keys(self, tenant_id: str, session: str, texts: Sequence[str]) -> PromptKeys:
        """Return the keys of a tenant's prompt with these texts; `session` may be empty."""
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
    """Return the keys of the longest beginnings; each depends on its own texts alone."""
    count = len(texts)
    since = max(0, count - _BEGINNINGS_MAX - _LAST)
    parts = [_bytes(it) for it in _parts(texts[since:])]
    first = [_bytes(it) for it in _parts(texts[:_FIRST])] if since else parts[:_FIRST]
    begun_first = begun.copy()
    begun_first.update(b"".join(first))
    found = list[bytes]()
    for end in range(max(1, count - _BEGINNINGS_MAX + 1), count + 1):
        if end < len(first):
            key = begun.copy()
            key.update(b"".join(first[:end]))
        else:
            key = begun_first.copy()
        last = parts[max(_FIRST, end - _LAST) - since : end - since]
        key.update(b"".join(last) + b"%d" % end)
        found.append(key.digest())
    return found


def _parts(texts: Sequence[str]) -> list[str]:
    """Return what texts count by: long ones by their ends, since a wrong match costs little."""
    return [
        f"{text}\0" if len(text) <= _WHOLE else f"{len(text)} {text[:_END]}{text[-_END:]}\0"
        for text in texts
    ]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
