"""What the admin REST takes about the fleet."""

from typing import Annotated, Literal

from pydantic import Field

from control_plane.fields import Body, Digest, Id, Text

Role = Literal["prefill", "decode"]
Share = Annotated[int, Field(ge=0, le=10_000)]


def _no_options() -> dict[Id, Text]:
    return {}


def _no_roles() -> dict[Role, Share]:
    return {}


class PoolBody(Body):
    """Replicas with one base, hardware and configuration.

    The pool is split into cells of at most `cell_replicas_max` replicas, each with a router of its
    own; 0 is one cell for all. `roles` says how many replicas only prefill and how many only
    decode; the others do both.
    """

    base_digest: Digest
    engine: Id
    replicas_wanted: Annotated[int, Field(ge=0, le=10_000)] = 1
    engine_options: Annotated[dict[Id, Text], Field(max_length=64, default_factory=_no_options)]
    cell_replicas_max: Annotated[int, Field(ge=0, le=10_000)] = 64
    roles: Annotated[dict[Role, Share], Field(default_factory=_no_roles)]
