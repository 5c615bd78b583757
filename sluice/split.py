"""Which release a request of a model in rollout goes to: sticky, and everywhere the same.

A request's bucket is a hash of model, salt, tenant and session; it is in canary when its bucket is
below the share. So a session that is once in canary stays there while the share grows, and every
gateway, after any restart, says the same. Each rollout has its own salt, so that other sessions are
the first ones in the next rollout.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

SHARE_MAX = 10_000  # basis points; all of the traffic
_HASH_BITS = 64


@dataclass(frozen=True, slots=True)
class ReleaseChoice:
    """The release of a request.

    Attributes:
        release: Release of the model.
        is_canary: Whether it is the new release.
        is_pinned: Whether the tenant is pinned to it; then the request is not part of the
            comparison.
    """

    release: str
    is_canary: bool
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseSplit:
    """The present split of a model's traffic.

    Attributes:
        model_id: Public name of the model, not an alias.
        control: The release that serves requests outside canary.
        canary: The release that is being rolled out.
        share: Basis points of the sessions that are in canary, 0 to `SHARE_MAX`.
        salt: Salt of the rollout; never changes while it lasts.
        pins: Tenant id -> release; comes before the share.
    """

    model_id: str
    control: str
    canary: str
    share: int
    salt: str
    pins: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        assert 0 <= self.share <= SHARE_MAX, self.share

    def choose(self, tenant_id: str, session: str, request_id: str) -> ReleaseChoice:
        """Return the release for a request; `session` is empty when the request names none."""
        pinned = self.pins.get(tenant_id)
        if pinned is not None:
            return ReleaseChoice(pinned, is_canary=pinned == self.canary, is_pinned=True)
        is_canary = bucket(self.model_id, self.salt, tenant_id, session or request_id) < self.share
        return ReleaseChoice(self.canary if is_canary else self.control, is_canary=is_canary)


def bucket(model_id: str, salt: str, tenant_id: str, key: str) -> int:
    """Return a number in [0, `SHARE_MAX`) that depends on the arguments alone.

    Lengths are part of what is hashed, so that no two different cases give the same text.

    Args:
        model_id: Public name of the model.
        salt: Salt of the rollout.
        tenant_id: Tenant; tenants with equal names of sessions are not in canary together.
        key: Session, or request id where there is none.
    """
    text = f"{len(model_id)}:{model_id}{len(salt)}:{salt}{len(tenant_id)}:{tenant_id}{key}"
    digest = hashlib.blake2b(text.encode(), digest_size=_HASH_BITS // 8).digest()
    # The high bits of hash x range: evenly spread to within 2**-50.
    return int.from_bytes(digest, "little") * SHARE_MAX >> _HASH_BITS
