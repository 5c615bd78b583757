"""Defines the table of engines, with the Triton model and the health check of each.

A node can offer only engines of this table, even if AGENT__ENGINES names others.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from replica.agent.canary import LlmCanary
from replica.agent.embed_canary import EmbedCanary
from replica.agent.replica_state import EngineSpec
from sluice.profiles import EMBED, FRAMES

# Runs a real inference at an address (host:port) within a number of seconds, and returns the number
# of routers' sequences that the engine has. Raises PlatformError, OSError or TimeoutError if the
# engine is not healthy. Raises WrongAnswerError for a wrong answer, which no load excuses.
Canary = Callable[[str, EngineSpec, float], Awaitable[int]]


_LINKS_MAX = 64  # largest number of open connections, which exceeds the number of engines of a node


class CanaryLink(Protocol):
    """A connection to one engine for canary inferences, one at a time."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> int:
        """Run an inference, with the results and errors of `Canary`."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A Triton model of the product, with the functions that check its health.

    Attributes:
        model: Name of the Triton model, and of its folder in the model repository.
        connect: Function that prepares a connection for canaries to the engine at an address.
        uses_accelerators: Whether engines of this kind use accelerators, so that a replica drains
            when one of its accelerators is cordoned.
        can_sleep: Whether an engine may be requested to release its KV memory, which it may still
            refuse.
    """

    model: str
    connect: Callable[[str], CanaryLink]
    uses_accelerators: bool = False
    can_sleep: bool = True


LLM = ModelKind(FRAMES.triton_model, LlmCanary)

KINDS: Mapping[str, ModelKind] = {
    "openvino": LLM,
    "sim": LLM,
    "trtllm": replace(LLM, uses_accelerators=True),
    "embed": ModelKind(EMBED.triton_model, EmbedCanary, can_sleep=False),
}


class Canaries:
    """Runs canaries over open connections, because a new connection costs more than a canary.

    After a failed canary its connection is closed, and the next canary opens a new connection.
    """

    def __init__(self) -> None:
        # ordered by last use, the latest at the end
        self._links: dict[tuple[str, str], CanaryLink] = {}

    async def __call__(self, address: str, spec: EngineSpec, timeout_s: float) -> int:
        """Run the canary of the spec's engine, with the results and errors of `Canary`."""
        key = (address, spec.engine)
        link = self._links.pop(key, None) or KINDS[spec.engine].connect(address)
        try:
            active = await link.probe(spec, timeout_s)
        except BaseException:
            await link.close()
            raise
        # another canary of this engine has run concurrently and has stored its connection
        if (other := self._links.pop(key, None)) is not None:
            await other.close()
        self._links[key] = link
        if len(self._links) > _LINKS_MAX:
            await self._links.pop(next(iter(self._links))).close()
        return active

    async def close(self) -> None:
        """Close all connections."""
        while self._links:
            await self._links.popitem()[1].close()


async def canary(address: str, spec: EngineSpec, timeout_s: float) -> int:
    """Run the canary of the spec's engine once, with the results and errors of `Canary`."""
    canaries = Canaries()
    try:
        return await canaries(address, spec, timeout_s)
    finally:
        await canaries.close()
