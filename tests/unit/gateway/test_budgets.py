"""Who is refused because a budget is used up, until when, and what is said."""

from typing import TYPE_CHECKING, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.directory import Principal
from gateway.limits.budgets import BudgetChecks, BudgetExhaustedError
from gateway.limits.limiter import Limiter
from gateway.server.errors import body_of, headers_of
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

if TYPE_CHECKING:
    from gateway.limits.valkey import ValkeyClient

NOON_MS = 1_900_000_000_000
DAY = wire.BudgetStop(
    name="daily", unit="tokens", amount=500, period="day", ends_at_unix_ms=NOON_MS + 90_500
)


def budgets(*stops: wire.BudgetStop, now_ms: int = NOON_MS) -> BudgetChecks:
    state = ControlState()
    upserts = wire.Objects(budget_stops=[wire.BudgetStops(id="t", stops=stops)])
    state.apply(wire.WatchResponse(version=1, upserts=upserts))
    return BudgetChecks(state, lambda: now_ms)


def test_the_answer_names_the_exhausted_budget_and_its_end() -> None:
    with pytest.raises(BudgetExhaustedError) as caught:
        budgets(DAY).require("t", "m")
    error = orjson.loads(body_of(caught.value))["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "'daily' (500 tokens per day, in UTC)" in error["message"]
    assert "2030-03-17T17:48:11Z" in error["message"]
    assert headers_of(caught.value) == {
        "Retry-After": "91",
        "x-should-retry": "false",
        "x-sluice-budget": "daily",
        "x-sluice-budget-ends": "2030-03-17T17:48:11Z",
    }


def test_only_the_tenant_itself_is_stopped_and_only_for_the_budgets_model() -> None:
    one = wire.BudgetStop(name="m", model_id="m", ends_at_unix_ms=NOON_MS + 1)
    known = budgets(one)
    known.require("other", "m")
    known.require("t", "n")
    with pytest.raises(BudgetExhaustedError, match="model 'm'"):
        known.require("t", "m")
    with pytest.raises(BudgetExhaustedError, match="daily"):  # it ends last
        budgets(one, DAY).require("t", "m")


@given(st.lists(st.integers(-5, 5), max_size=4))
def test_a_period_that_ended_opens_by_itself(ends: list[int]) -> None:
    known = budgets(*(wire.BudgetStop(name="b", ends_at_unix_ms=NOON_MS + end) for end in ends))
    if any(end > 0 for end in ends):
        with pytest.raises(BudgetExhaustedError):
            known.require("t", "m")
    else:
        known.require("t", "m")


async def test_a_limiter_checks_budgets_only_for_token_users() -> None:
    class NoValkey:
        is_connected = False
        deadline_s = 1.0

        def listen(self, listener: object) -> None:
            pass

    limiter = Limiter(
        cast("ValkeyClient", NoValkey()),
        local_share=1.0,
        clock=lambda: 0.0,
        require_budget=budgets(DAY).require,
    )
    caller = Principal(wire.ApiKey(id="k"), wire.Tenant(id="t"), wire.Tier())
    for prompt_tokens, output_tokens in ((1, 0), (0, 1), (2, 3)):
        with pytest.raises(BudgetExhaustedError):
            await limiter.reserve(
                caller,
                "m",
                prompt_tokens=prompt_tokens,
                output_tokens_max=output_tokens,
                is_bounded=True,
            )
    await limiter.reserve(caller, "m", prompt_tokens=0, output_tokens_max=0, is_bounded=True)
