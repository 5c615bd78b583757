"""The models whose caches hold the prefixes of conversations, as this worker has seen them. Pure.

A prompt is known by the keys of its beginnings: the next turn of a conversation begins with the
messages of the last one, and so does every other prompt that shares its beginning and its cache.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.auto.prompt_keys import PromptKeys

# A pin to a cache ends this long after the last token.
CACHED_S = 300.0
# About 0.2 kB each.
_PREFIXES_MAX = 20_000


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
        self._prefixes: OrderedDict[bytes, KnownPrefix] = OrderedDict()

    def __len__(self) -> int:
        """Return how many prompts are known."""
        return len(self._prefixes)

    def look(self, keys: PromptKeys, now_s: float) -> CachedPrefixes:
        """Return the cached prefixes of a prompt, as of `now_s` on the worker's clock."""
        found = (self._prefixes.get(key) for key in keys.longest_first)
        return prefixes_of(it for it in found if it is not None and it.until_s >= now_s)

    def note(self, keys: PromptKeys, model: str, tokens: int, now_s: float) -> None:
        """Remember the model that has answered a prompt."""
        for key in keys.whole:
            self._prefixes[key] = KnownPrefix(model, tokens, now_s + CACHED_S)
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._prefixes_max:
            self._prefixes.popitem(last=False)


def prefixes_of(known: Iterable[KnownPrefix]) -> CachedPrefixes:
    """Return the cached prefixes of a prompt, from the known ones, the longest first."""
    current, tokens = "", dict[str, int]()
    for it in known:
        current = current or it.model
        tokens.setdefault(it.model, it.tokens)
    return CachedPrefixes(current, tokens)
