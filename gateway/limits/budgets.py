"""Refuses new requests of a tenant with an exhausted budget until the budget's period ends.

The control plane compares budgets with the ledger. It sends the stopped tenants, each with the end
of its period. So the gateway ends a refusal on time even while the control plane is unreachable.
"""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from sluice.errors import ErrorCode, RejectedError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


class BudgetExhaustedError(RejectedError):
    """The caller's tenant has exhausted a budget of this period.

    Attributes:
        headers: Headers with the budget and the end of its period. A further header prevents
            OpenAI's clients from retrying the 429 automatically.
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
    """Checks whether a tenant is stopped."""

    def __init__(self, state: ControlState, unix_ms: Callable[[], int] = _unix_ms) -> None:
        """Each check reads the present state and the present time.

        Args:
            state: State of the control plane, with the stopped tenants.
            unix_ms: Returns the Unix time in milliseconds, to compare with the ends of periods.
        """
        self._state = state
        self._unix_ms = unix_ms

    def require(self, tenant_id: str, model_id: str) -> None:
        """Raise unless the tenant may send a request for a model.

        Raises:
            BudgetExhaustedError: A budget is exhausted. The error names the budget that ends last.
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
