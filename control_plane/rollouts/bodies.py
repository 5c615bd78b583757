"""Bodies of the rollouts' REST."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from control_plane.fields import AdminBody, Id
from control_plane.models.model import ReleaseName
from control_plane.rollouts.plan import Plan


class PlanChange(Plan):
    """A plan, which is either the body itself or the body's field `plan`, as in a GET."""

    plan: Plan | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.plan is not None and len(self.model_fields_set) > 1:
            others = ", ".join(sorted(self.model_fields_set - {"plan"}))
            raise ValueError(f"the plan is given twice: leave out plan, or {others}")
        return self

    @property
    def wanted(self) -> Plan:
        """The plan, read from the body or from its field `plan`."""
        return self.plan or Plan.model_validate(self.model_dump(exclude={"plan"}))


class RolloutBody(AdminBody):
    """A release that shall receive a model's traffic.

    `release` is the name of the release without the name of the model. Without a plan, the model's
    stored plan applies. If `is_started` is false, the rollout only measures control until an
    operator starts it.
    """

    model_id: Id
    release: Annotated[ReleaseName, Field(min_length=1)]
    plan: Plan | None = None
    is_started: bool = True


class PromoteBody(AdminBody):
    """The number of the stage to end. No other stage ends, even if the caller's view is stale."""

    stage: Annotated[int, Field(ge=0, le=100)]
