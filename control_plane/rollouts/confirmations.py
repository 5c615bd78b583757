"""What gateways confirm, written down for whichever control plane steps the rollouts."""

from control_plane.database import Database
from control_plane.rollouts import repository

_DEADLINE_S = 2.0  # gateways say it again anyway


class Confirmations:
    """Takes what gateways decide by."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def confirm(self, gateway_id: str, version: int, oldest_open_ms: int) -> None:
        """Keep the version of the state, and when (Unix ms; 0: none) the oldest request came.

        Raises:
            DatabaseDownError: Nothing was kept.
        """
        await self._database.run(
            lambda connection: repository.confirm(connection, gateway_id, version, oldest_open_ms),
            deadline_s=_DEADLINE_S,
        )
