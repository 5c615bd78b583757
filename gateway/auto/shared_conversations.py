"""Shares cached prefixes between gateways in Valkey, since any worker may receive the next turn."""

from typing import cast

from gateway.auto.memory import CACHED_S, CachedPrefixes, KnownPrefix, prefixes_of
from gateway.auto.prompt_keys import PromptKeys
from gateway.limits.valkey_commands import ValkeyCommands, ValkeyDownError

_KEY = b"sluice:auto:"
_CACHED_MS = round(CACHED_S * 1000)
# Seconds for which a choice waits for Valkey. Without an answer, `auto` only ignores other workers.
_DEADLINE_S = 0.02


class SharedConversations:
    """Reads and writes the prefixes recorded by all gateways of the installation."""

    def __init__(self, commands: ValkeyCommands) -> None:
        self._commands = commands

    async def look(self, keys: PromptKeys) -> CachedPrefixes:
        """Return the cached prefixes of a prompt, or no prefixes if Valkey is down or slow."""
        words = (b"MGET", *[_KEY + it for it in keys.longest_first])
        try:
            found = await self._commands.call(words, deadline_s=_DEADLINE_S)
        except ValkeyDownError:
            return CachedPrefixes("", {})
        return prefixes_of(_parse_prefix(it) for it in cast("list[bytes | None]", found) if it)

    def note(self, keys: PromptKeys, model: str, tokens: int) -> None:
        """Record for all workers that a model answered a prompt, without waiting for Valkey."""
        value = f"{tokens} {model}".encode()
        for key in keys.whole:
            self._commands.send_only((b"SET", _KEY + key, value, b"PX", _CACHED_MS))


def _parse_prefix(value: bytes) -> KnownPrefix:
    tokens, _, model = value.decode().partition(" ")
    return KnownPrefix(model, int(tokens), until_s=0.0)
