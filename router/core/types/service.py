"""The reports by which the cells of a pool exchange how many tokens their tenants received."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TenantService(NamedTuple):
    """The service of one tenant in one tier of a cell, which is counted in tokens.

    Attributes:
        priority: Priority of the tier.
        tenant_id: Id of the tenant.
        since: Number of the first report after the account was opened.
        service: Virtual service since the account was opened, that is, (computed prompt tokens + 2
            x output tokens) / weight. Lost and repeated reports do no harm to this total.
    """

    priority: int
    tenant_id: str
    since: int
    service: float


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The accounts of one cell with recent changes.

    Attributes:
        cell_id: Id of the cell.
        owner: Router that owns the cell.
        epoch: Epoch of the owner's record of the cell. A later record has a greater epoch.
        number: Number of this report within the epoch, in ascending order.
        accounts: Changed accounts.
    """

    cell_id: str
    owner: str
    epoch: int
    number: int
    accounts: Sequence[TenantService] = ()
