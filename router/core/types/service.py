"""The reports in which the cells of a pool exchange the service of their tenants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TenantService(NamedTuple):
    """The service of one tenant in one tier of a cell.

    Attributes:
        priority: Priority of the tier.
        tenant_id: Id of the tenant.
        since: Number of the first report that could hold this account.
        service: Virtual service since the account was opened: computed prompt tokens and 2 x output
            tokens, over the weight. A sum, so that a report may be lost or come twice.
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
        owner: Router that owns it.
        epoch: Epoch of the owner's book of the cell; a later book has a greater one.
        number: Number of this report in the epoch; it grows.
        accounts: Changed accounts.
    """

    cell_id: str
    owner: str
    epoch: int
    number: int
    accounts: Sequence[TenantService] = ()
