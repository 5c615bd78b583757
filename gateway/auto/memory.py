"""Remembers which models have cached prefixes of recent conversations, for one worker. Pure.

Each beginning of a prompt (its first messages) has a key. The next turn of a conversation begins
with the messages of the last turn, so both have the same keys for these messages. The same is true
of any two prompts with the same first messages.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.auto.prompt_keys import PromptKeys

# Seconds after an answer's end for which its prompt is assumed to be cached.
CACHED_S = 300.0
# Maximum number of recorded prompts, about 0.2 kB each.
_PREFIXES_MAX = 20_000


class KnownPrefix(NamedTuple):
    """A prompt that a model has answered, and the time until which it counts as cached."""

    model: str
    tokens: int
    until_s: float


class CachedPrefixes(NamedTuple):
    """The prefixes of a prompt that are assumed to be in the caches of replicas.

    Attributes:
        current: Model that answered the longest known prefix, or empty if no prefix is known.
        tokens: Number of tokens of the longest cached prefix, by model.
    """

    current: str
    tokens: Mapping[str, int]


class ConversationMemory:
    """The prompts of the last minutes, by their keys. If it is full, the oldest are dropped."""

    def __init__(self, prefixes_max: int = _PREFIXES_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._prefixes: OrderedDict[bytes, KnownPrefix] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of recorded keys."""
        return len(self._prefixes)

    def look(self, keys: PromptKeys, now_s: float) -> CachedPrefixes:
        """Return the cached prefixes of a prompt. `now_s` is the time on the worker's clock."""
        found = (self._prefixes.get(key) for key in keys.longest_first)
        return prefixes_of(it for it in found if it is not None and it.until_s >= now_s)

    def note(self, keys: PromptKeys, model: str, tokens: int, now_s: float) -> None:
        """Record that a model has answered a prompt, which its replicas have therefore cached."""
        for key in keys.whole:
            self._prefixes[key] = KnownPrefix(model, tokens, now_s + CACHED_S)
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._prefixes_max:
            self._prefixes.popitem(last=False)


def prefixes_of(known: Iterable[KnownPrefix]) -> CachedPrefixes:
    """Combine the known prefixes of a prompt, given with the longest prefix first."""
    current, tokens = "", dict[str, int]()
    for it in known:
        current = current or it.model
        tokens.setdefault(it.model, it.tokens)
    return CachedPrefixes(current, tokens)
