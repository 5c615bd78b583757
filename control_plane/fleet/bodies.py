"""What the admin REST takes about the fleet."""

from typing import Annotated

from pydantic import Field

from control_plane.fields import Body, Digest, Id, Text


def _no_options() -> dict[Id, Text]:
    return {}


class PoolBody(Body):
    """Replicas with one base, hardware and configuration."""

    base_digest: Digest
    engine: Id
    replicas_wanted: Annotated[int, Field(ge=0, le=10_000)] = 1
    engine_options: Annotated[dict[Id, Text], Field(max_length=64, default_factory=_no_options)]
