"""Permissions on the admin REST, by role, action and owner. Pure.

A table states, for each role and action, on which objects the role may perform the action
(`Reach`). Viewer, operator and admin form a hierarchy, in which each role has the rights of the
previous role. A reader and a publisher belong to one tenant each, and reach no objects of another
tenant. An object without an owner (`owner` None) is public. A publisher may read public objects,
but may not write them. A reader sees only its tenant's usage, requests, batches and budgets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Role(StrEnum):
    """The role of an admin key, which determines its permissions."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    READER = "reader"
    PUBLISHER = "publisher"
    ADMIN = "admin"

    @property
    def has_tenant(self) -> bool:
        """Whether the role belongs to one tenant."""
        return self in {Role.READER, Role.PUBLISHER}


class Action(StrEnum):
    """The kind of access that a route needs. Every route names one action."""

    READ_PUBLIC = "read_public"  # bases and pools, which models of any tenant may use
    READ_USAGE = "read_usage"  # a tenant's usage, requests and budgets
    READ_TENANT = "read_tenant"  # objects that may belong to a tenant
    READ_PLATFORM = "read_platform"  # all objects that no other read action covers
    # text policies, which contain the words that a tenant masks
    READ_TEXT_POLICIES = "read_text_policies"
    SEE_TEXTS = "see_texts"  # stored texts of requests
    WRITE_ARTIFACTS = "write_artifacts"
    # models, releases, aliases and bases
    WRITE_MODELS = "write_models"
    WRITE_ROLLOUTS = "write_rollouts"
    CONTROL_ROLLOUTS = "control_rollouts"  # pause, resume and abort rollouts
    WRITE_FLEET = "write_fleet"
    WRITE_TENANTS = "write_tenants"  # tiers, tenants and tenants' keys
    WRITE_ACCESS = "write_access"  # admin keys


class Reach(IntEnum):
    """The objects on which a role may perform an action."""

    NOTHING = 0
    OWN = 1
    OWN_AND_PUBLIC = 2
    ALL = 3


_NOTHING, _OWN, _VISIBLE, _ALL = Reach
_ROLES = (Role.VIEWER, Role.OPERATOR, Role.READER, Role.PUBLISHER, Role.ADMIN)
_TABLE: Mapping[Action, tuple[Reach, Reach, Reach, Reach, Reach]] = {
    # action                  viewer    operator  reader    publisher admin
    Action.READ_PUBLIC:      (_ALL,     _ALL,     _NOTHING, _VISIBLE, _ALL),
    Action.READ_USAGE:       (_ALL,     _ALL,     _OWN,     _OWN,     _ALL),
    Action.READ_TENANT:      (_ALL,     _ALL,     _NOTHING, _VISIBLE, _ALL),
    Action.READ_PLATFORM:    (_ALL,     _ALL,     _NOTHING, _NOTHING, _ALL),
    Action.READ_TEXT_POLICIES: (_NOTHING, _NOTHING, _NOTHING, _OWN,   _ALL),
    Action.SEE_TEXTS:        (_NOTHING, _NOTHING, _NOTHING, _OWN,     _ALL),
    Action.WRITE_ARTIFACTS:  (_NOTHING, _NOTHING, _NOTHING, _OWN,     _ALL),
    Action.WRITE_MODELS:     (_NOTHING, _NOTHING, _NOTHING, _OWN,     _ALL),
    Action.WRITE_ROLLOUTS:   (_NOTHING, _NOTHING, _NOTHING, _OWN,     _ALL),
    Action.CONTROL_ROLLOUTS: (_NOTHING, _ALL,     _NOTHING, _OWN,     _ALL),
    Action.WRITE_FLEET:      (_NOTHING, _ALL,     _NOTHING, _NOTHING, _ALL),
    Action.WRITE_TENANTS:    (_NOTHING, _NOTHING, _NOTHING, _NOTHING, _ALL),
    Action.WRITE_ACCESS:     (_NOTHING, _NOTHING, _NOTHING, _NOTHING, _ALL),
}  # fmt: skip


def reach(role: Role, action: Action) -> Reach:
    """Return the reach of a role for an action."""
    return _TABLE[action][_ROLES.index(role)]


def may(role: Role, tenant_id: str, action: Action, owner: str | None) -> bool:
    """Return whether a caller may perform an action on an object.

    Args:
        role: Role of the key.
        tenant_id: Tenant of a publisher's or reader's key, or empty for the other roles.
        action: Kind of access.
        owner: Tenant of the object, or None or empty for a public object.
    """
    match reach(role, action):
        case Reach.ALL:
            return True
        case Reach.NOTHING:
            return False
        case Reach.OWN:
            return bool(owner) and owner == tenant_id
        case Reach.OWN_AND_PUBLIC:
            return not owner or owner == tenant_id


def roles_for(action: Action) -> list[Role]:
    """Return the roles that may perform an action on at least some objects."""
    return [role for role in _ROLES if reach(role, action) > Reach.NOTHING]


@dataclass(frozen=True, slots=True)
class Actor:
    """The caller of an admin route, as identified by its key or session.

    Attributes:
        id: Id of the admin key, or `bootstrap` for the key of the settings.
        role: Role of the key.
        tenant_id: Tenant of a publisher's or reader's key, or empty for the other roles.
        name: Name of the key or the person for display, possibly empty.
    """

    id: str
    role: Role
    tenant_id: str = ""
    name: str = ""

    def may(self, action: Action, owner: str | None) -> bool:
        """Return whether the actor may perform an action on an object of this tenant.

        An owner of None is a public object.
        """
        return may(self.role, self.tenant_id, action, owner)

    def reach(self, action: Action) -> Reach:
        """Return the actor's reach for an action."""
        return reach(self.role, action)

    @property
    def words(self) -> str:
        """Return the key's role and tenant, in words."""
        return f"{self.role} of tenant {self.tenant_id}" if self.tenant_id else str(self.role)
