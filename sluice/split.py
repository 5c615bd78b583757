"""Chooses the release for a request while a model is rolled out. Sticky and deterministic.

The bucket of a request is a hash of model, salt, tenant and session. The request is served by the
canary release if its bucket is below the canary's share. So a session on the canary stays there
while the share grows, and all gateways agree, even after restarts. Each rollout has its own salt,
so that the next rollout begins with other sessions.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

SHARE_MAX = 10_000  # basis points of the whole traffic
_HASH_BITS = 64


@dataclass(frozen=True, slots=True)
class ReleaseChoice:
    """The release of a request.

    Attributes:
        release: Release of the model.
        is_canary: Whether the release is the canary.
        is_pinned: Whether the tenant is pinned to the release, so that the rollout's comparison
            omits the request.
    """

    release: str
    is_canary: bool
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseSplit:
    """The current split of a model's traffic between two releases.

    Attributes:
        model_id: Public name of the model, not an alias.
        control: Release that serves all other requests.
        canary: Release that is rolled out.
        share: Share of the sessions that the canary serves, in basis points, 0 to `SHARE_MAX`.
        salt: Salt of the rollout, constant for the whole rollout.
        pins: Release by tenant id. A pin has precedence over the share.
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
        """Return the release for a request, whose `session` may be empty."""
        pinned = self.pins.get(tenant_id)
        if pinned is not None:
            return ReleaseChoice(pinned, is_canary=pinned == self.canary, is_pinned=True)
        is_canary = bucket(self.model_id, self.salt, tenant_id, session or request_id) < self.share
        return ReleaseChoice(self.canary if is_canary else self.control, is_canary=is_canary)


def bucket(model_id: str, salt: str, tenant_id: str, key: str) -> int:
    """Return a number in [0, `SHARE_MAX`) that depends only on the arguments.

    The hashed text includes the lengths of its parts, so that different arguments lead to different
    texts.

    Args:
        model_id: Public name of the model.
        salt: Salt of the rollout.
        tenant_id: Id of the tenant, so that equal session names of two tenants are independent.
        key: Name of the session, or the request id without a session.
    """
    text = f"{len(model_id)}:{model_id}{len(salt)}:{salt}{len(tenant_id)}:{tenant_id}{key}"
    digest = hashlib.blake2b(text.encode(), digest_size=_HASH_BITS // 8).digest()
    # The high bits of hash x range are uniform to within 2**-50.
    return int.from_bytes(digest, "little") * SHARE_MAX >> _HASH_BITS
