"""The Triton model and the health check of each engine of `sluice.engines`.

A node can offer only these engines. AGENT__ENGINES can select from them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from replica.agent.canary import LlmCanary
from replica.agent.embed_canary import EmbedCanary
from replica.agent.replica_state import EngineSpec
from sluice.engines import ENGINES
from sluice.profiles import EMBED, FRAMES

# Runs a real inference at an address (host:port) within a number of seconds. Returns the number of
# routers' sequences in the engine. Raises PlatformError, OSError or TimeoutError if the engine is
# not healthy. Raises WrongAnswerError for a wrong answer, which an overload does not excuse.
Canary = Callable[[str, EngineSpec, float], Awaitable[int]]


_LINKS_MAX = 64  # largest number of open connections, more than a node has engines


class CanaryLink(Protocol):
    """A connection to one engine for canary inferences, one at a time."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> int:
        """Run an inference. Results and errors are those of `Canary`."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A Triton model of the product, with the functions that check its health.

    Attributes:
        model: Name of the Triton model, and of its folder in the model repository.
        connect: Function that creates a client for canaries to the engine at an address.
        uses_accelerators: Whether engines of this kind use accelerators. If so, the cordon of an
            accelerator drains the replicas that use it.
        can_sleep: Whether the agent may request that an engine releases its KV memory.
    """

    model: str
    connect: Callable[[str], CanaryLink]
    uses_accelerators: bool = False
    can_sleep: bool = False


LLM = ModelKind(FRAMES.triton_model, LlmCanary)
_CANARIES: Mapping[str, Callable[[str], CanaryLink]] = {
    FRAMES.name: LlmCanary,
    EMBED.name: EmbedCanary,
}

KINDS: Mapping[str, ModelKind] = {
    engine.name: ModelKind(
        engine.profile.triton_model,
        _CANARIES[engine.profile.name],
        uses_accelerators=engine.uses_accelerators,
        can_sleep=engine.can_sleep,
    )
    for engine in ENGINES.values()
}


class Canaries:
    """Runs canaries over open connections, because a new connection costs more than a canary.

    A failed canary closes its connection, and the next canary opens a new connection.
    """

    def __init__(self) -> None:
        # Connections in the order of their last use, so that the oldest is closed first.
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
        # Another canary of this engine may have ended meanwhile, and have stored its connection.
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
