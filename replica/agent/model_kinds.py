"""The table of engines: the Triton model of each, and the inference that proves it alive.

One table. An engine that is missing here cannot be offered by a node, whatever AGENT__ENGINES says.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from replica.agent.canary import llm_canary
from replica.agent.embed_canary import embed_canary
from replica.agent.replica_state import EngineSpec
from sluice.profiles import EMBED, FRAMES

# Runs a real inference at an address (host:port) within seconds and returns how many sequences the
# engine holds for routers; PlatformError, OSError or TimeoutError say that it is not healthy.
# WrongAnswerError says that it answered wrongly: being busy is no excuse.
Canary = Callable[[str, EngineSpec, float], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A Triton model of the product.

    Attributes:
        model: Its name in Triton, and its folder in the model repository.
        canary: Asks it for a sign of life.
        uses_accelerators: Whether it needs one. Then it drains when one of its own is cordoned.
    """

    model: str
    canary: Canary
    uses_accelerators: bool = False


LLM = ModelKind(FRAMES.triton_model, llm_canary)

KINDS: Mapping[str, ModelKind] = {
    "openvino": LLM,
    "sim": LLM,
    "trtllm": replace(LLM, uses_accelerators=True),
    "embed": ModelKind(EMBED.triton_model, embed_canary),
}


async def canary(address: str, spec: EngineSpec, timeout_s: float) -> int:
    """Run the canary of the spec's engine; see `Canary`."""
    return await KINDS[spec.engine].canary(address, spec, timeout_s)
