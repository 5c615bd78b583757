"""The reason why a request goes to a release other than the one its name points at. Pure."""

from dataclasses import dataclass

from sluice.wire.telemetry.v1 import telemetry_pb2 as wire

_ARMS = {wire.ARM_CONTROL: "control", wire.ARM_CANARY: "canary"}


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """The reason why a request goes to its release.

    Attributes:
        rollout_id: Rollout whose split decided; empty: none.
        arm: Arm of that rollout.
        is_pinned: Whether the tenant's pin decided; no rollout counts such a request.
        missed: Release of a pin or a split that no pool serves: the request goes to the release
            that the name points at.
        unready: Release of a split whose base is not loaded here yet: the request goes to control,
            and no rollout counts it, because the split did not choose control.
        unloaded: Release of a split whose adapter no engine could load: control answered, as with
            `unready`, and the event of a copy reports canary's fault.
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
