"""Keys of prompts and of their beginnings: a turn of a conversation begins with the last. Pure.

Keys leave the process, as other gateways look prompts up by them. Without the secret of the
installation they reveal no text.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_KEY_BYTES = 12
# Beginnings that have keys: the turns of a conversation add two or three messages each.
_BEGINNINGS_MAX = 64
_WHOLE = 64  # characters of a text that is hashed as a whole


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
        begun = self._begun.copy()
        begun.update(_part(tenant_id))
        session_key = b""
        if session:
            of_session = begun.copy()
            of_session.update(_part(f"session {session}"))
            session_key = of_session.digest()
        begun.update(b"".join(map(_part, texts[:-_BEGINNINGS_MAX])))
        found = list[bytes]()
        for text in texts[-_BEGINNINGS_MAX:]:
            begun.update(_part(text))
            found.append(begun.copy().digest())
        return PromptKeys(session_key, found)


def _part(text: str) -> bytes:
    """Return what a text counts by: a long one by its ends, since a wrong match costs little."""
    if len(text) > _WHOLE:
        text = f"{len(text)} {text[: _WHOLE // 2]}{text[-_WHOLE // 2 :]}"
    return text.encode(errors="surrogatepass") + b"\0"
