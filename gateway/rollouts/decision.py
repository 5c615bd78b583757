"""Why a request goes to a certain release, when it is not just what the name stands for. Pure."""

from dataclasses import dataclass

from sluice.wire.telemetry.v1 import telemetry_pb2 as wire

_ARMS = {wire.ARM_CONTROL: "control", wire.ARM_CANARY: "canary"}


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """The reason why a request goes to its release.

    Attributes:
        rollout_id: Rollout whose split decided; empty: none.
        arm: Arm of that rollout.
        is_pinned: Whether the tenant's pin decided; without a lot, no rollout counts the request.
        missed: The release that a pin or a split names and nobody serves: it could not decide, and
            the request goes to what the name stands for.
        unready: The release that a split names and whose base is not loaded here yet: the request
            goes to control, which no rollout counts, because the split did not choose it.
        unloaded: The release that a split chose and whose adapter no engine could load: control
            answered, as with `unready`, and an event of a copy tells of canary's fault.
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
        """A label of metrics: `control`, `canary`, `pinned`, `unserved`, `unready`, `unloaded`."""
        if self.missed:
            return "unserved"
        if self.unready:
            return "unready"
        if self.unloaded:
            return "unloaded"
        return "pinned" if self.is_pinned else _ARMS[self.arm]


PINNED = ReleaseDecision(is_pinned=True)
KINDS = (*_ARMS.values(), "pinned", "unserved", "unready", "unloaded")
