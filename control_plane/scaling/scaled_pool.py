"""A scaled pool as a round finds it: its settings, its record and its observations. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.scaling.memory import PoolSight
from control_plane.scaling.model import DECODE, PREFILL, ScalingSettings
from control_plane.scaling.roles import key_of


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool that has bounds for scaling, or one role of such a pool.

    Attributes:
        settings: Operators' settings. Minimum and maximum are raised to the replicas that rollouts
            need.
        is_on: Whether decisions are carried out.
        memory: Stored record of the pool, which `Memory.from_json` reads.
        speed_key: Base, hardware and configuration of the pool's replicas.
        hand: Number of replicas set by operators, used while the pool is not scaled.
        scaled: Number of replicas of the last plan in effect, or None without a plan.
        sight: Present observations of the pool.
        sleepers: Number of sleeping replicas of the last plan. They have no role.
        ask_warning: Warning about the pool's actuator, or an empty text.
        role: Role of the counted replicas, or empty if the pool has no roles.
        condition: Reason why the pool has fewer replicas than wanted, or empty.
    """

    id: str
    settings: ScalingSettings
    is_on: bool
    memory: Mapping[str, Any]
    speed_key: tuple[str, str, str]
    hand: int
    scaled: int | None
    sight: PoolSight
    sleepers: int = 0
    ask_warning: str = ""
    role: str = ""
    condition: str = ""

    @property
    def before(self) -> int:
        """Number of replicas that serve or should serve since the last plan."""
        return self.hand if self.scaled is None else self.scaled

    @property
    def key(self) -> str:
        """Key of the pool or role in `plan`."""
        return key_of(self.id, self.role)

    @property
    def partner(self) -> str:
        """Key of the pool's other role, or empty without roles."""
        others = {PREFILL: DECODE, DECODE: PREFILL}
        return key_of(self.id, others[self.role]) if self.role else ""
