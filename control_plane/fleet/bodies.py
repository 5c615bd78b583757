"""Request bodies of the admin REST for the fleet."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_serializer, model_validator

from control_plane.fields import AdminBody, Digest, Id, Text
from control_plane.fleet.model import REPLICAS_MAX
from sluice.adapter_ranks import RANK, RANK_MAX, SLOTS

Role = Literal["prefill", "decode"]
Share = Annotated[int, Field(ge=0, le=10_000)]


def _no_options() -> dict[Id, Text]:
    return {}


def _no_roles() -> dict[Role, Share]:
    return {}


class NeedsBody(AdminBody):
    """The resources that one replica needs of its node. Zero is no requirement.

    A dedicated replica has its accelerators for itself. Other replicas may share accelerators, and
    reserve parts of their memory.
    """

    memory_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    accelerators: Annotated[int, Field(ge=0, le=1024)] = 0
    accelerator_memory_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    is_dedicated: bool = False

    @model_validator(mode="after")
    def _names_accelerators(self) -> Self:
        if not self.accelerators and (self.accelerator_memory_bytes or self.is_dedicated):
            raise ValueError("send the number of accelerators that a replica needs")
        return self

    @model_serializer
    def _set_ones(self) -> dict[str, int]:
        """Return the needs that are not zero."""
        return {name: value for name, value in self if value}


class PoolBody(AdminBody):
    """Replicas with one base, hardware and configuration.

    The pool is split into cells of at most `cell_replicas_max` replicas, each owned by one router.
    If the limit is 0, one cell has all replicas. `roles` has the numbers of replicas that only
    prefill and that only decode. The remaining replicas do both. `needs` are the resources of one
    replica, which runs on a node with enough room and keeps its accelerators. Without needs, a
    replica runs on the least loaded node.
    """

    base_digest: Digest
    engine: Id
    replicas_wanted: Annotated[int, Field(ge=0, le=REPLICAS_MAX)] = 1
    engine_options: Annotated[dict[Id, Text], Field(max_length=64, default_factory=_no_options)]
    cell_replicas_max: Annotated[int, Field(ge=0, le=10_000)] = 64
    roles: Annotated[dict[Role, Share], Field(default_factory=_no_roles)]
    needs: Annotated[NeedsBody, Field(default_factory=NeedsBody)]

    @model_validator(mode="after")
    def _has_room_for_adapters(self) -> Self:
        for name, least in ((SLOTS, 0), (RANK, 1)):
            given = self.engine_options.get(name, str(least))
            if not given.isdecimal() or not least <= int(given) <= RANK_MAX:
                bounds = f"{least} to {RANK_MAX} are taken"
                raise ValueError(f"engine option {name} is {given}: {bounds}")
        return self


class NodeOrders(AdminBody):
    """Operators' orders for a node.

    An unschedulable node receives no new replicas. A draining node also loses its present replicas,
    and is always unschedulable.
    """

    is_unschedulable: bool = False
    is_draining: bool = False
    reason: Text = ""
