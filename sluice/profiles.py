"""The protocol of a replica, by the engine of its pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """The protocol of a replica.

    Attributes:
        name: Name of the protocol. `frames` uses step frames, through the router that owns the
            cell. `embed` uses one request per text, without a router.
        triton_model: Name of the model in the replica's Triton.
    """

    name: str
    triton_model: str


FRAMES = Profile("frames", "llm")
EMBED = Profile("embed", "embed")
