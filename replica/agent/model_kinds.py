"""The table of engines: the Triton model of each, and the inference that proves it alive.

One table. An engine that is missing here cannot be offered by a node, whatever AGENT__ENGINES says.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from replica.agent.canary import LlmCanary
from replica.agent.embed_canary import EmbedCanary
from replica.agent.replica_state import EngineSpec
from sluice.profiles import EMBED, FRAMES

# Runs a real inference at an address (host:port) within seconds and returns how many sequences the
# engine holds for routers; PlatformError, OSError or TimeoutError say that it is not healthy.
# WrongAnswerError says that it answered wrongly: being busy is no excuse.
Canary = Callable[[str, EngineSpec, float], Awaitable[int]]


_LINKS_MAX = 64  # kept; more engines than a node has


class CanaryLink(Protocol):
    """A connection to one engine, over which it is asked for signs of life, one at a time."""

    async def ask(self, spec: EngineSpec, timeout_s: float) -> int:
        """Run an inference; see `Canary`."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A Triton model of the product.

    Attributes:
        model: Name in Triton, and of the folder in the model repository.
        connect: Prepares a connection to the engine at an address, to ask for signs of life.
        uses_accelerators: Whether the kind needs accelerators. Then a replica drains when one of
            its own is cordoned.
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
    """Runs canaries; to connect costs more than to ask, so connections are kept.

    One over which an engine did not answer well is closed, and the next canary connects anew.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], CanaryLink] = {}  # the one used last is the last one

    async def __call__(self, address: str, spec: EngineSpec, timeout_s: float) -> int:
        """Run the canary of the spec's engine; see `Canary`."""
        key = (address, spec.engine)
        link = self._links.pop(key, None) or KINDS[spec.engine].connect(address)
        try:
            active = await link.ask(spec, timeout_s)
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
