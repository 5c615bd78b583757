"""Budgets that are used up: new requests of the tenant are refused until the period ends.

The control plane compares budgets with the ledger and tells who is to be stopped, and until when.
So a period that ends opens by itself here, whoever is away.
"""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from sluice.errors import ErrorCode, RejectedError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


class BudgetExhaustedError(RejectedError):
    """The caller's tenant has used up what it may use in this period.

    Attributes:
        headers: Which budget it was and when its period ends; OpenAI's clients, which repeat a 429
            by themselves, are told not to.
    """

    def __init__(self, stop: wire.BudgetStop, now_unix_ms: int) -> None:
        ends = datetime.fromtimestamp(math.ceil(stop.ends_at_unix_ms / 1000), UTC)
        ends_at = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
        what = f"{stop.amount} {stop.unit} per {stop.period}"
        if stop.model_id:
            what += f" for model '{stop.model_id}'"
        message = (
            f"You exceeded your current quota: the budget '{stop.name}' ({what}, in UTC) is used"
            f" up. The next {stop.period} begins at {ends_at}; ask for a larger budget if you need"
            " more before."
        )
        wait_s = (stop.ends_at_unix_ms - now_unix_ms) / 1000
        super().__init__(ErrorCode.INSUFFICIENT_QUOTA, message, retry_after_s=wait_s)
        self.headers = {
            "x-should-retry": "false",
            "x-sluice-budget": stop.name,
            "x-sluice-budget-ends": ends_at,
        }


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class BudgetChecks:
    """Looks tenants up among those that are stopped."""

    def __init__(self, state: ControlState, unix_ms: Callable[[], int] = _unix_ms) -> None:
        """Prepare.

        Args:
            state: State of the control plane, with the stopped tenants.
            unix_ms: The time, by which periods end.
        """
        self._state = state
        self._unix_ms = unix_ms

    def require(self, tenant_id: str, model_id: str) -> None:
        """Do nothing if a request for a model may be taken.

        Raises:
            BudgetExhaustedError: It may not; of several budgets, by the one that ends last.
        """
        stopped = self._state.budget_stops.get(tenant_id)
        if stopped is None:
            return
        now_ms = self._unix_ms()
        that_hold = [
            stop
            for stop in stopped.stops
            if stop.model_id in ("", model_id) and now_ms < stop.ends_at_unix_ms
        ]
        if that_hold:
            raise BudgetExhaustedError(max(that_hold, key=_end), now_ms)


def _end(stop: wire.BudgetStop) -> int:
    return stop.ends_at_unix_ms
