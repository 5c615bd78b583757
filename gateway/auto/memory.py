"""The models whose caches hold the prefixes of conversations, as this worker has seen them. Pure.

A prompt is known by the chain of its messages: the next turn of a conversation begins with the
messages of the last one, and so does every other prompt that shares its beginning and its cache.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A pin to a cache ends so long after the last token.
CACHED_S = 300.0
# About 0.2 kB each.
_PREFIXES_MAX = 20_000
# Prefixes that a turn is looked up by: the turns of a conversation add two or three messages each.
_LOOKED_AT_MAX = 64
_WHOLE = 256  # characters of a text that is hashed as a whole


class KnownPrefix(NamedTuple):
    """A prompt that a model has answered."""

    model: str
    tokens: int
    until_s: float


class CachedPrefixes(NamedTuple):
    """The prefixes of a prompt that replicas have in their caches.

    Attributes:
        current: Model that answered the longest known prefix; empty: no prefix is known.
        tokens: Tokens of the longest cached prefix, by model.
    """

    current: str
    tokens: Mapping[str, int]


class ConversationMemory:
    """The prompts of the last minutes, by their chains; bounded: the oldest are dropped first."""

    def __init__(self, prefixes_max: int = _PREFIXES_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._known: OrderedDict[int, KnownPrefix] = OrderedDict()

    def __len__(self) -> int:
        """Return how many prompts are known."""
        return len(self._known)

    def look(self, chain: Sequence[int], now_s: float) -> CachedPrefixes:
        """Return the cached prefixes of a prompt, as of `now_s` on the worker's clock."""
        current, tokens = "", dict[str, int]()
        for key in reversed(chain[-_LOOKED_AT_MAX:]):
            known = self._known.get(key)
            if known is None or known.until_s < now_s:
                continue
            current = current or known.model
            tokens.setdefault(known.model, known.tokens)
        return CachedPrefixes(current, tokens)

    def note(self, key: int, model: str, tokens: int, now_s: float) -> None:
        """Remember the model that has answered a prompt; `key` is the end of the prompt's chain."""
        self._known[key] = KnownPrefix(model, tokens, now_s + CACHED_S)
        self._known.move_to_end(key)
        while len(self._known) > self._prefixes_max:
            self._known.popitem(last=False)


def _ends(text: str) -> tuple[int, str, str]:
    """Return the ends of a long text, to tell it from others; a wrong match costs little."""
    return len(text), text[: _WHOLE // 2], text[-_WHOLE // 2 :]


def chain_of(tenant_id: str, session: str, texts: Sequence[str]) -> list[int]:
    """Return the keys of a prompt's beginnings, the session's first and the whole prompt's last.

    Python's own hashes do: they hold in this process only, and reveal no text to other processes.
    """
    key = hash(tenant_id)
    keys = [hash((key, session))] if session else []
    for text in texts:
        key = hash((key, text if len(text) <= _WHOLE else _ends(text)))
        keys.append(key)
    return keys
