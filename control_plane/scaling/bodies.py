"""Request bodies of the admin REST for scaling."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from control_plane.fields import AdminBody
from control_plane.fleet.bodies import Role
from control_plane.fleet.model import REPLICAS_MAX
from control_plane.scaling.replay import REPLAY_HOURS_MAX

_BUCKET_MIN_S = 5
_BUCKETS_MAX = REPLAY_HOURS_MAX * 3600 // _BUCKET_MIN_S
_Tokens = Annotated[int, Field(ge=0, le=1 << 53)]
_Replicas = Annotated[int, Field(ge=0, le=REPLICAS_MAX)]


class RoleBoundsBody(AdminBody):
    """Bounds of one role, in addition to the bounds of its pool. A maximum of null is no bound."""

    replicas_min: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    replicas_max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.replicas_max is not None and self.replicas_min > self.replicas_max:
            raise ValueError(
                f"replicas_min {self.replicas_min} is above replicas_max {self.replicas_max}"
            )
        return self


def _no_roles() -> dict[Role, RoleBoundsBody]:
    return {}


class ScalingBody(AdminBody):
    """Bounds within which a pool is scaled.

    If `is_on` is false, the number of replicas is only planned and shown. `minute_worth` is the
    cost that is worth one avoided violated minute. Its unit is a minute of `replicas_max` replicas.
    A replica is kept for the longest boot, at most `hold_s`, after demand last needed it. With
    `replicas_min` 0, the pool is scaled to zero after `idle_s` without a request. `price` is money
    per replica and hour, for the budget.

    Sleeping replicas serve within seconds. `sleepers_share` is their number per replica of the
    busiest quarter-hour of the day, and `sleepers_min` is their least number. The default share is
    0.05 if the engine can sleep. For other engines, every share except 0 is refused.

    In a pool with the role `prefill`, the plan decides the number of replicas of each role. The
    bounds apply to the sum, and `roles` bounds single roles.

    `actuator` names the system that adds nodes for the pool. Each node runs `replicas_per_node`
    replicas. If the name is empty, replicas run on the existing nodes.
    """

    is_on: bool = True
    replicas_min: _Replicas = 1
    replicas_max: _Replicas
    minute_worth: Annotated[float, Field(ge=0, le=1000)] = 3.0
    idle_s: Annotated[float, Field(ge=1, le=604_800)] = 900.0
    hold_s: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    price: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    sleepers_share: Annotated[float, Field(ge=0, le=1)] | None = None
    sleepers_min: _Replicas = 0
    actuator: Annotated[str, Field(max_length=63)] = ""
    replicas_per_node: Annotated[int, Field(ge=1, le=1000)] = 1
    roles: Annotated[dict[Role, RoleBoundsBody], Field(default_factory=_no_roles)]

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.replicas_min > self.replicas_max:
            raise ValueError(
                f"replicas_min {self.replicas_min} is above replicas_max {self.replicas_max}"
            )
        return self


class ScalingPinBody(AdminBody):
    """A number of replicas set by hand.

    The number is in effect for `for_s` seconds, or until an operator removes it if `for_s` is 0. In
    a pool with roles, `prefill` of the replicas only prefill. If it is null, demand decides.
    """

    replicas: _Replicas
    for_s: Annotated[float, Field(ge=0, le=31_536_000)] = 0.0
    prefill: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None

    @model_validator(mode="after")
    def _leaves_some_for_decode(self) -> Self:
        if self.prefill is not None and self.prefill >= self.replicas:
            raise ValueError(
                f"prefill {self.prefill} of {self.replicas} replicas leaves none for decode"
            )
        return self


class ScalingReplayBody(AdminBody):
    """A trace, as sums of tokens per `bucket_s` seconds, and the bounds to try with it.

    A missing bound has its present value.
    """

    bucket_s: Annotated[int, Field(ge=_BUCKET_MIN_S, le=900)] = 15
    prompt_tokens: Annotated[list[_Tokens], Field(min_length=1, max_length=_BUCKETS_MAX)]
    output_tokens: Annotated[list[_Tokens], Field(min_length=1, max_length=_BUCKETS_MAX)]
    replicas_min: _Replicas | None = None
    replicas_max: _Replicas | None = None
    minute_worth: Annotated[float, Field(ge=0, le=1000)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise ValueError("prompt_tokens and output_tokens must have as many numbers")
        if len(self.prompt_tokens) * self.bucket_s > REPLAY_HOURS_MAX * 3600:
            raise ValueError(f"a trace of more than {REPLAY_HOURS_MAX} hours")
        return self


class ScalingBudgetBody(AdminBody):
    """Bounds over all pools together. A bound of null is no bound.

    Both bounds also count the replicas of pools whose number is set by hand. `price` is money per
    hour. A replica of a pool without a price costs `accelerator_price` for each of its
    accelerators.
    """

    accelerators: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    price: Annotated[float, Field(ge=0, le=1e9)] | None = None
    accelerator_price: Annotated[float, Field(ge=0, le=1e6)] = 0.0
