"""Request bodies of the admin REST for scaling."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from control_plane.fields import AdminBody
from control_plane.fleet.model import REPLICAS_MAX

_Replicas = Annotated[int, Field(ge=0, le=REPLICAS_MAX)]


class ScalingBody(AdminBody):
    """Bounds within which a pool is scaled.

    With `is_on` false the number is only planned and shown. `minute_worth` are the minutes that the
    pool at its maximum may run for one violated minute less. A replica stays for `hold_s` after
    demand has last asked for it. With `replicas_min` 0 the pool goes to none after `idle_s` without
    a request. `price` is the money of a replica and hour, for the budget.

    Replicas that sleep serve within seconds: `sleepers_share` per replica of the busiest quarter of
    an hour of the day, and at least `sleepers_min`. The share is 0.05 where nothing is said and the
    engine can sleep; for others anything but 0 is refused.

    `actuator` names who brings nodes for the pool, of which each takes `replicas_per_node`; empty:
    replicas go to the nodes that there are.
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

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.replicas_min > self.replicas_max:
            raise ValueError(
                f"replicas_min {self.replicas_min} is above replicas_max {self.replicas_max}"
            )
        return self


class ScalingPinBody(AdminBody):
    """A number that stands until it is lifted, or for `for_s` seconds; 0: until it is lifted."""

    replicas: _Replicas
    for_s: Annotated[float, Field(ge=0, le=31_536_000)] = 0.0


class ScalingBudgetBody(AdminBody):
    """Bounds over all pools together; null: any.

    `accelerators` counts what pools have whose number is set by hand, too; `price` is money per
    hour of the pools that are scaled.
    """

    accelerators: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    price: Annotated[float, Field(ge=0, le=1e9)] | None = None
