"""Decides when an accelerator is put out of service (cordoned).

The decision is pure, since `judge` maps (state, readings, now) to the next state. A
`HardwareReader` supplies the readings, and `replica.agent.fleet` decides how a cordon affects
replicas. A cordon lasts until an operator lifts it, even if the agent restarts, because the driver
reports each XID only once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

# From NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, read in
# November 2026). The table has each XID whose immediate action is to reset the GPU, to restart the
# machine, or to check its mechanics. It also has the XIDs whose workflow ends in such an action. It
# has 94, after which a drain prepares for a reset at a convenient time. It omits XIDs that end only
# the application (13, 31, 43, 45, ...) and XIDs to be ignored (63, 92). It omits 155, which also
# reports links that were disabled on purpose. It omits 144-150, because NVML does not report the
# sub-code with their severity. Fatal ones of these occur together with 48.
CORDON_XIDS: Mapping[int, str] = {
    46: "the GPU stopped processing",
    48: "uncorrectable ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "initialization error",
    156: "resources were retired",
    158: "fatal timeout",
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of an accelerator at one time.

    Attributes:
        index: Index of the accelerator in its driver's numbering.
        uuid: Unique id of the accelerator.
        name: Model of the accelerator.
        memory_bytes: Total memory in bytes.
        memory_used_bytes: Used memory in bytes.
        temperature_c: Temperature of the chip in degrees Celsius, or 0 if not reported.
        power_w: Present power consumption in watts, or 0 if not reported.
        ecc_uncorrected: Number of uncorrected memory errors since the driver was loaded, or 0
            without ECC.
        has_remap_failure: Whether the GPU could not replace a broken row of its memory.
        is_lost: Whether the driver can no longer reach the accelerator.
    """

    index: int
    uuid: str
    name: str = ""
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    ecc_uncorrected: int = 0
    has_remap_failure: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Xid:
    """An error reported by NVIDIA's driver. The uuid is empty if the GPU is unknown."""

    uuid: str
    number: int


@dataclass(frozen=True, slots=True)
class Readings:
    """The readings of all accelerators, and the errors reported since the previous readings."""

    gpus: tuple[GpuReading, ...]
    xids: tuple[Xid, ...] = ()


class HardwareReader(Protocol):
    """Reads the hardware. A read blocks, and hangs if the driver hangs."""

    def read(self, wait_s: float) -> Readings:
        """Wait up to `wait_s` for an error report, and return the present readings."""
        ...


@dataclass(frozen=True, slots=True)
class Cordon:
    """The fact that an accelerator is out of service.

    Attributes:
        uuid: Unique id of the accelerator.
        index: Index of the accelerator when the cordon was set.
        reason: Reason as text for operators.
        since_unix_s: Unix seconds when the cordon was set.
    """

    uuid: str
    index: int
    reason: str
    since_unix_s: float

    @property
    def id(self) -> str:
        """Id of this cordon. A later cordon of the same accelerator has another id."""
        return f"{self.uuid}@{self.since_unix_s:.3f}"


@dataclass(frozen=True, slots=True)
class HardwareState:
    """The last readings and the cordons of a node's accelerators.

    Attributes:
        gpus: Last readings of all accelerators, including lost ones.
        cordons: Cordons by uuid.
        accepted: Pairs (uuid, cause) of lifted cordons. The same cause sets no new cordon.
    """

    gpus: tuple[GpuReading, ...] = ()
    cordons: Mapping[str, Cordon] = field(default_factory=dict[str, Cordon])
    accepted: frozenset[tuple[str, str]] = frozenset()

    def cordon_of(self, indexes: Collection[int]) -> Cordon | None:
        """Return the first cordon among these accelerators, or among all if `indexes` is empty."""
        cordons = sorted(self.cordons.values(), key=lambda cordon: cordon.index)
        return next((c for c in cordons if not indexes or c.index in indexes), None)


def judge(state: HardwareState, readings: Readings, now_unix_s: float) -> HardwareState:
    """Return the state after new readings. It has a cordon for every broken accelerator.

    Args:
        state: State from the last call.
        readings: Readings of the accelerators.
        now_unix_s: Wall-clock time in Unix seconds, which is only shown to people.
    """
    seen = {gpu.uuid: gpu for gpu in readings.gpus}
    gone = [replace(gpu, is_lost=True) for gpu in state.gpus if gpu.uuid not in seen]
    gpus = sorted([*readings.gpus, *gone], key=lambda gpu: (gpu.index, gpu.uuid))
    cordons = dict(state.cordons)
    for gpu in gpus:
        if gpu.uuid in cordons:
            continue
        for cause, reason in _faults(gpu, readings.xids):
            if (gpu.uuid, cause) not in state.accepted:
                cordons[gpu.uuid] = Cordon(gpu.uuid, gpu.index, reason, now_unix_s)
                break
    return replace(state, gpus=tuple(gpus), cordons=cordons)


def lift(state: HardwareState, ids: Collection[str]) -> HardwareState:
    """Return the state without these cordons, and accept the causes that are present now."""
    uuids = {cordon.uuid for cordon in state.cordons.values() if cordon.id in ids}
    if not uuids:
        return state
    faults = {(gpu.uuid, cause) for gpu in state.gpus for cause, _ in _faults(gpu, ())}
    return replace(
        state,
        cordons={uuid: cordon for uuid, cordon in state.cordons.items() if uuid not in uuids},
        accepted=state.accepted | {fault for fault in faults if fault[0] in uuids},
    )


def _faults(gpu: GpuReading, xids: Collection[Xid]) -> list[tuple[str, str]]:
    """Return (cause, reason) of all faults, the clearest fault first.

    Operators read the reason. The cause only identifies the faults of lifted cordons.
    """
    faults = [
        (f"xid {xid.number}", f"XID {xid.number}: {CORDON_XIDS[xid.number]}")
        for xid in xids
        if xid.uuid in ("", gpu.uuid) and xid.number in CORDON_XIDS
    ]
    if gpu.is_lost:
        faults.append(("lost", "its driver cannot reach it any more"))
    if gpu.has_remap_failure:
        faults.append(("remap", "a broken row of its memory could not be replaced"))
    if gpu.ecc_uncorrected:
        count = gpu.ecc_uncorrected
        faults.append((f"ecc {count}", f"{count} uncorrected ECC errors since its driver started"))
    return faults
