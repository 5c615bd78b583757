"""The artifacts that a node should have, as a shared mapping and the node's differences. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from control_plane.distribution.model import Priority

_NOTHING: Mapping[str, Priority] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Wants:
    """The artifacts that a node should have, in a form that many nodes can share.

    Attributes:
        shared: Priority by digest. Nodes with the same wants share one object, which never changes.
        own: Differences from `shared`, by digest. The priority None means that the node should not
            have the artifact.
    """

    shared: Mapping[str, Priority] = field(default_factory=lambda: _NOTHING)
    own: Mapping[str, Priority | None] = field(default_factory=dict[str, Priority | None])

    def of(self, digest: str) -> Priority | None:
        """Return the priority of an artifact, or None if the node should not have the artifact."""
        return self.own[digest] if digest in self.own else self.shared.get(digest)

    def flat(self) -> dict[str, Priority]:
        """Return all artifacts as one new mapping."""
        kept = {digest: p for digest, p in self.shared.items() if digest not in self.own}
        return kept | {digest: p for digest, p in self.own.items() if p is not None}


def wants_of(
    shared: Mapping[str, Priority], needed: Iterable[str], declined: Iterable[str]
) -> Wants:
    """Return the artifacts that a node should have.

    Args:
        shared: Priorities from the state.
        needed: Artifacts that requests on the node wait for.
        declined: Artifacts for which the node has no room. The node should have such an artifact
            only if it is needed.
    """
    own: dict[str, Priority | None] = {d: None for d in declined if d in shared}
    own |= dict.fromkeys(needed, Priority.NEEDED)
    return Wants(shared, own)
