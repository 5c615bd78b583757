"""Creates, updates and deletes the records of cells and replicas that the router is assigned."""

from collections.abc import Iterable

from router.core.cell import CellBook
from router.core.fleet.replica import ReplicaBook
from router.core.lifecycle import RequestLifecycle, moved
from router.core.types.config import CoreConfig
from router.core.types.plan import ReplicaPlan


class Ownership:
    """Creates, updates and deletes the router's records of its cells and replicas."""

    def __init__(
        self,
        config: CoreConfig,
        cells: dict[str, CellBook],
        replicas: dict[str, ReplicaBook],
        lifecycle: RequestLifecycle,
    ) -> None:
        """Store references to the router's records, which `adopt` changes."""
        self._config = config
        self._cells = cells
        self._replicas = replicas
        self._lifecycle = lifecycle

    def adopt(self, owned: Iterable[str], plans: Iterable[ReplicaPlan], epoch: int) -> None:
        """Apply the complete assignment of cells and replicas from `RouterCore.on_cells`."""
        wanted = dict.fromkeys(owned)
        for cell_id in wanted:
            cell = self._cells.get(cell_id)
            if cell is None:
                cell = self._cells[cell_id] = CellBook(cell_id, self._config, epoch)
            cell.is_owned = cell.is_dirty = True
        planned = {plan.replica_id: plan for plan in plans if plan.cell_id in wanted}
        for plan in planned.values():
            book = self._replicas.get(plan.replica_id)
            if book is None:
                book = ReplicaBook(plan.replica_id, plan.cell_id, self._config.tpot_s)
                self._replicas[plan.replica_id] = book
                self._cells[plan.cell_id].fleet.replicas[plan.replica_id] = book
        for book in list(self._replicas.values()):
            wanted_plan = planned.get(book.replica_id)
            book.is_leaving = wanted_plan is None or wanted_plan.cell_id != book.cell_id
            book.is_draining = book.is_leaving or (
                wanted_plan is not None and wanted_plan.is_draining
            )
            if wanted_plan is not None and not book.is_leaving:
                book.role = wanted_plan.role
            self._cells[book.cell_id].update(book)
        for cell in self._cells.values():
            if cell.cell_id not in wanted and cell.is_owned:
                self._give_up_cell(cell)
        self._forget(wanted)

    def _give_up_cell(self, cell: CellBook) -> None:
        cell.is_owned = False
        cell.fleet.absent_since = None
        for request in cell.queue.drain():
            self._lifecycle.end(request, moved(cell.cell_id, emitted=bool(request.output)))

    def _forget(self, wanted: dict[str, None]) -> None:
        """Delete the records of replicas and cells that are no longer assigned and are empty."""
        for book in list(self._replicas.values()):
            if book.is_leaving and not book.dispatches and book.limits is None:
                cell = self._cells[book.cell_id]
                del self._replicas[book.replica_id]
                cell.fleet.forget(book.replica_id)
        for cell in list(self._cells.values()):
            if cell.cell_id not in wanted and not cell.fleet.replicas:
                del self._cells[cell.cell_id]
