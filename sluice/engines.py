"""The engines that replicas can run, as one table from which all other parts read.

A new engine needs one entry here and, if it generates text, `replica/drivers/NAME.py` with the
function `load_NAME`. Its packages belong into an extra of `pyproject.toml`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sluice.profiles import EMBED, FRAMES, Profile


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """An engine's default room for adapters.

    Attributes:
        slots: Most adapters in one batch, or 0 if no adapters are served.
        rank: Largest rank of an adapter.
    """

    slots: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One engine.

    Attributes:
        name: Name of the engine in pools, settings and options, and of its driver's module.
        summary: A few words for the help of commands.
        profile: Protocol of the engine's replicas.
        adapters: Default room for adapters. None if the engine takes no adapters at all.
        packages: Python distributions that a node needs for the engine. The agent checks them.
        needs_base: Whether the engine needs the files of a base.
        can_sleep: Whether an engine can release its KV memory.
        uses_accelerators: Whether the engine uses accelerators. If so, the cordon of an accelerator
            drains the replicas that use it.
        is_offered: Whether a node offers the engine unless `AGENT__ENGINES` says otherwise.
        is_local: Whether the base of a local stack can be served with it (`sluice up --engine`).
        nodes: Kind of nodes in the Helm chart, `cpu`, `embed` or `gpu`. Empty if the chart has none
            for the engine.
    """

    name: str
    summary: str
    profile: Profile = FRAMES
    adapters: AdapterRoom | None = None
    packages: tuple[str, ...] = ()
    needs_base: bool = True
    can_sleep: bool = False
    uses_accelerators: bool = False
    is_offered: bool = True
    is_local: bool = False
    nodes: str = ""


OPENVINO = EngineKind(
    name="openvino",
    summary="a real model on the CPU",
    adapters=AdapterRoom(slots=8, rank=16),
    packages=("openvino",),
    can_sleep=True,
    is_local=True,
    nodes="cpu",
)
SIM = EngineKind(
    name="sim",
    summary="timed answers without weights",
    adapters=AdapterRoom(slots=8, rank=64),
    needs_base=False,
    can_sleep=True,
    is_local=True,
)
EMBEDDING = EngineKind(
    name="embed",
    summary="vectors of texts on the CPU",
    profile=EMBED,
    packages=("openvino",),
    nodes="embed",
)
TRTLLM = EngineKind(
    name="trtllm",
    summary="a real model on NVIDIA GPUs",
    adapters=AdapterRoom(slots=0, rank=64),
    uses_accelerators=True,
    is_offered=False,
    nodes="gpu",
)
ENGINES: Mapping[str, EngineKind] = MappingProxyType(
    {engine.name: engine for engine in (OPENVINO, SIM, EMBEDDING, TRTLLM)}
)


def profile_of(engine: str) -> Profile:
    """Return the profile of a pool's engine."""
    kind = ENGINES.get(engine)
    return FRAMES if kind is None else kind.profile


def names(is_wanted: Callable[[EngineKind], bool]) -> tuple[str, ...]:
    """Return the names of the engines for which a condition holds, in the table's order."""
    return tuple(engine.name for engine in ENGINES.values() if is_wanted(engine))
