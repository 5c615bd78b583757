"""Remembers which models have cached prefixes of recent conversations, for one worker. Pure.

A prompt is identified by the keys of its beginnings. The next turn of a conversation begins with
the messages of the last turn, so it shares their keys and the cached prefix. The same is true of
any other prompt with the same beginning.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.auto.prompt_keys import PromptKeys

# Seconds after the last token for which a prefix is assumed to be cached.
CACHED_S = 300.0
# Maximum number of prefixes, about 0.2 kB each.
_PREFIXES_MAX = 20_000


class KnownPrefix(NamedTuple):
    """A prompt that a model has answered, and the time until which it is assumed to be cached."""

    model: str
    tokens: int
    until_s: float


class CachedPrefixes(NamedTuple):
    """The prefixes of a prompt that are assumed to be in the caches of replicas.

    Attributes:
        current: Model that answered the longest known prefix, or empty if no prefix is known.
        tokens: Tokens of the longest cached prefix, by model.
    """

    current: str
    tokens: Mapping[str, int]


class ConversationMemory:
    """The prompts of the last minutes by their keys. A full memory drops the oldest prompts."""

    def __init__(self, prefixes_max: int = _PREFIXES_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._prefixes: OrderedDict[bytes, KnownPrefix] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._prefixes)

    def look(self, keys: PromptKeys, now_s: float) -> CachedPrefixes:
        """Return the cached prefixes of a prompt. `now_s` is the time on the worker's clock."""
        found = (self._prefixes.get(key) for key in keys.longest_first)
        return prefixes_of(it for it in found if it is not None and it.until_s >= now_s)

    def note(self, keys: PromptKeys, model: str, tokens: int, now_s: float) -> None:
        """Record which model has answered a prompt."""
        for key in keys.whole:
            self._prefixes[key] = KnownPrefix(model, tokens, now_s + CACHED_S)
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._prefixes_max:
            self._prefixes.popitem(last=False)


def prefixes_of(known: Iterable[KnownPrefix]) -> CachedPrefixes:
    """Return the cached prefixes of a prompt from its known prefixes, longest first."""
    current, tokens = "", dict[str, int]()
    for it in known:
        current = current or it.model
        tokens.setdefault(it.model, it.tokens)
    return CachedPrefixes(current, tokens)
