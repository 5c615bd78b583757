"""Stores gateways' confirmations for the control plane that steps the rollouts."""

from control_plane.database import Database
from control_plane.rollouts import repository
from control_plane.rollouts.facts import Confirmation

_DEADLINE_S = 2.0  # Seconds. A failure does no harm, because gateways repeat confirmations.


class Confirmations:
    """Stores which version of the splits each gateway follows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def confirm(
        self, gateway_id: str, version: int, oldest_open_ms: int, missing_bases: frozenset[str]
    ) -> None:
        """Store a gateway's confirmation.

        Raises:
            DatabaseDownError: The confirmation was not stored.
        """
        said = Confirmation(gateway_id, version, oldest_open_ms, missing_bases)
        await self._database.run(
            lambda connection: repository.confirm(connection, said), deadline_s=_DEADLINE_S
        )
