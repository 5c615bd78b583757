"""The reason why a request uses another release than its model's name points at. Pure."""

from dataclasses import dataclass

from sluice.wire.telemetry.v1 import telemetry_pb2 as wire

_ARMS = {wire.ARM_CONTROL: "control", wire.ARM_CANARY: "canary"}


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """The reason why a release was chosen for a request.

    Attributes:
        rollout_id: Rollout whose split decided. The id is empty if no split decided.
        arm: Arm of that rollout.
        is_pinned: Whether the tenant's pin decided. No rollout counts a pinned request.
        missed: Release of a pin or a split that no pool serves. The release that the name points at
            answers instead.
        unready: Release of a split whose base this gateway has not loaded yet. Control answers, and
            no rollout counts the request, because the split did not choose control.
        unloaded: Release of a split whose adapter no engine could load. Control answers, as with
            `unready`, and the event of a copy reports the canary's failure.
    """

    rollout_id: str = ""
    arm: wire.Arm = wire.ARM_UNSPECIFIED
    is_pinned: bool = False
    missed: str = ""
    unready: str = ""
    unloaded: str = ""

    @property
    def has_decided(self) -> bool:
        """Whether a pin or a split chose the release."""
        return not (self.missed or self.unready or self.unloaded)

    @property
    def kind(self) -> str:
        """Label of metrics: `control`, `canary`, `pinned`, `unserved`, `unready`, `unloaded`."""
        if self.missed:
            return "unserved"
        if self.unready:
            return "unready"
        if self.unloaded:
            return "unloaded"
        return "pinned" if self.is_pinned else _ARMS[self.arm]


PINNED = ReleaseDecision(is_pinned=True)
KINDS = (*_ARMS.values(), "pinned", "unserved", "unready", "unloaded")
