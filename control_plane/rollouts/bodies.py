"""Bodies of the rollouts' REST."""

from typing import Annotated

from pydantic import Field

from control_plane.fields import Body, Id
from control_plane.models.model import ReleaseName
from control_plane.rollouts.plan import Plan


class RolloutBody(Body):
    """A release that shall take over a model's traffic.

    `release` is its name, without the model's. Without a plan, that of the model holds. Without
    `is_started` it waits for somebody to start it, and learns meanwhile what control is like.
    """

    model_id: Id
    release: Annotated[ReleaseName, Field(min_length=1)]
    plan: Plan | None = None
    is_started: bool = True


class PromoteBody(Body):
    """Which stage is to be ended: the one that was seen, so that none is ended unseen."""

    stage: Annotated[int, Field(ge=0, le=100)]
