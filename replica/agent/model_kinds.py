"""The table of engines: the Triton model of each, and the inference that checks its health.

A node can offer only engines of this table, whatever AGENT__ENGINES says.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from replica.agent.canary import LlmCanary
from replica.agent.embed_canary import EmbedCanary
from replica.agent.replica_state import EngineSpec
from sluice.profiles import EMBED, FRAMES

# Runs a real inference at an address (host:port) within a number of seconds, and returns the number
# of sequences that the engine holds for routers. PlatformError, OSError or TimeoutError: the engine
# is not healthy. WrongAnswerError: it answered wrongly, which no load excuses.
Canary = Callable[[str, EngineSpec, float], Awaitable[int]]


_LINKS_MAX = 64  # kept; more engines than a node has


class CanaryLink(Protocol):
    """A connection to one engine for canary inferences, one at a time."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> int:
        """Run an inference; see `Canary`."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A Triton model of the product.

    Attributes:
        model: Name of the Triton model, and of its folder in the model repository.
        connect: Prepares a connection for canaries to the engine at an address.
        uses_accelerators: Whether the kind needs accelerators. If so, a replica drains when one of
            its accelerators is cordoned.
        can_sleep: Whether the engine may be asked to release its KV memory; it may still refuse.
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
    """Runs canaries over kept connections, since connecting costs more than a canary.

    After a bad answer the connection is closed, and the next canary opens a new one.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], CanaryLink] = {}  # the one used last is the last one

    async def __call__(self, address: str, spec: EngineSpec, timeout_s: float) -> int:
        """Run the canary of the spec's engine; see `Canary`."""
        key = (address, spec.engine)
        link = self._links.pop(key, None) or KINDS[spec.engine].connect(address)
        try:
            active = await link.probe(spec, timeout_s)
        except BaseException:
            await link.close()
            raise
        if (other := self._links.pop(key, None)) is not None:  # of a canary at the same time
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
    """Run the canary of the spec's engine, once; see `Canary`."""
    canaries = Canaries()
    try:
        return await canaries(address, spec, timeout_s)
    finally:
        await canaries.close()
