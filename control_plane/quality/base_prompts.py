"""Computes the token ids of the default prompts with the tokenizer of each base."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Protocol

import structlog

from control_plane.quality.askings import DEFAULT_TEXTS, generating_bases
from control_plane.quality.tokenizing import TokenizingError, token_ids_apart
from sluice.errors import PlatformError
from sluice.watch import ControlState

log = structlog.get_logger(__name__)

_TICK_S = 2.0
_RETRY_S = 60.0
_TOKENIZER_FILE = "tokenizer.json"

# The function yields the content of a file, for the digest of an artifact and the file's name. It
# raises PlatformError if the file cannot be read.
ReadText = Callable[[str, str], AsyncGenerator[bytes]]
# The function stores the canary prompt of a base, for the base's digest and the prompt's token ids.
WriteCanary = Callable[[str, tuple[int, ...]], Awaitable[None]]
TokenIds = Mapping[str, tuple[tuple[int, ...], ...]]


class StateFeed(Protocol):
    """A source of the present state."""

    @property
    def state(self) -> ControlState:
        """The state at present."""
        ...


class BasePrompts:
    """Tokenizes the default prompts once per base. Routers test replicas with the first prompt.

    Attributes:
        token_ids: Token ids of each of `DEFAULT_TEXTS`, by digest of the base.
    """

    def __init__(self, feed: StateFeed, read_text: ReadText, write_canary: WriteCanary) -> None:
        """Create the tokenizer. `run` must be started in a TaskGroup.

        Args:
            feed: Source of bases and pools.
            read_text: Reads a file of a base.
            write_canary: Stores the canary prompt of a base. Raises PlatformError if it was not
                stored.
        """
        self.token_ids: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._feed = feed
        self._read_text = read_text
        self._write_canary = write_canary
        self._retry_at_s: dict[str, float] = {}

    async def run(self) -> None:
        """Tokenize for new bases until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        """Tokenize the prompts for new bases, and drop bases that no pool serves any more."""
        bases = generating_bases(self._feed.state)
        self.token_ids = {base: ids for base, ids in self.token_ids.items() if base in bases}
        for base in sorted(bases - self.token_ids.keys()):
            if self._retry_at_s.get(base, 0.0) > monotonic():
                continue
            try:
                self.token_ids = self.token_ids | {base: await self._tokenized(base)}
            except (PlatformError, TokenizingError, OSError) as error:
                is_first = base not in self._retry_at_s
                self._retry_at_s[base] = monotonic() + _RETRY_S
                if is_first:  # until a retry succeeds, the base uses `DEFAULT_TOKENS`
                    log.warning("base_prompts_not_made", base=base, error=str(error))
        await self._tell_routers()

    async def _tell_routers(self) -> None:
        """Store the canary prompts that are not stored yet, so that routers receive them."""
        for base, ids in sorted(self.token_ids.items()):
            known = self._feed.state.bases.get(base)
            if known is None or tuple(known.canary_token_ids) == ids[0]:
                continue
            try:
                await self._write_canary(base, ids[0])
            except PlatformError as error:
                log.warning("base_canary_not_written", base=base, error=str(error))

    async def _tokenized(self, base: str) -> tuple[tuple[int, ...], ...]:
        async with aclosing(self._read_text(base, _TOKENIZER_FILE)) as pieces:
            content = b"".join([piece async for piece in pieces])
        return tuple(await token_ids_apart(content, DEFAULT_TEXTS))
