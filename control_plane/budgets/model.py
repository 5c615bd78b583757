"""Computes a budget's state from a tenant's permitted and actual usage in a period. Pure.

The state depends only on the usage in the ledger, not on earlier states. So a correction that
lowers usage, a larger amount, or a new period reopens an exhausted budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from control_plane.fields import AdminBody, checked_id

# Largest number of budgets per tenant. It is small, because gateways search the exhausted budgets
# of a tenant for each request.
BUDGETS_MAX = 16
AMOUNT_MAX = 2**53  # largest amount, because JSON numbers are exact up to this value


class Unit(StrEnum):
    """The unit in which a budget measures usage."""

    TOKENS = "tokens"
    REQUESTS = "requests"


class Period(StrEnum):
    """The period of a budget, in UTC."""

    DAY = "day"
    MONTH = "month"


class OnExhausted(StrEnum):
    """The consequence of an exhausted budget."""

    STOP = "stop"
    ALERT = "alert"


class State(StrEnum):
    """The state of a budget. The values are shown, stored and used in metrics."""

    OK = "ok"
    SOFT = "soft"
    EXHAUSTED = "exhausted"


UNKNOWN = "unknown"  # the ledger was not queried for the present period yet


def _model_or_any(value: str) -> str:
    return checked_id(value) if value else ""


def _ascending(values: list[int]) -> list[int]:
    return sorted(set(values))


def _default_percents() -> list[int]:
    return [80]


class BudgetBody(AdminBody):
    """An amount that a tenant may use in each day or month of UTC.

    The unit `tokens` counts the tokens of prompts and answers. Of the cached prompt tokens,
    `cached_percent` percent count. `model_id` restricts the budget to requests that one model
    answers. When usage reaches one of `soft_percents` of the amount, the event is reported. When
    the amount is used, `stop` refuses new requests until the period ends, and `alert` only reports
    the exhaustion.
    """

    unit: Annotated[Unit, Field(strict=False)] = Unit.TOKENS
    amount: Annotated[int, Field(ge=1, le=AMOUNT_MAX)]
    period: Annotated[Period, Field(strict=False)] = Period.MONTH
    model_id: Annotated[str, AfterValidator(_model_or_any)] = ""
    cached_percent: Annotated[int, Field(ge=0, le=100)] = 100
    soft_percents: Annotated[
        list[Annotated[int, Field(ge=1, le=99)]],
        Field(max_length=8, default_factory=_default_percents),
        AfterValidator(_ascending),
    ]
    on_exhausted: Annotated[OnExhausted, Field(strict=False)] = OnExhausted.STOP


@dataclass(frozen=True, slots=True)
class BudgetSpan:
    """A period in Unix milliseconds. The end is exclusive."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A tenant's usage in a period. `prompt_tokens` include `cached_tokens`."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """The fields of a budget that determine its state, as `BudgetBody` describes them."""

    unit: Unit
    amount: int
    period: Period
    cached_percent: int
    soft_percents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.amount >= 1, self.amount

    def used(self, usage: Usage) -> int:
        """Return the used amount in the budget's unit, rounded down."""
        if self.unit is Unit.REQUESTS:
            return usage.requests
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        prompt = usage.prompt_tokens - cached + cached * self.cached_percent // 100
        return prompt + usage.output_tokens

    def reached_percent(self, usage: Usage) -> int:
        """Return the highest soft percent that the usage has reached, or 0."""
        used = self.used(usage) * 100
        reached = (it for it in self.soft_percents if used >= it * self.amount)
        return max(reached, default=0)

    def state(self, usage: Usage) -> State:
        """Return the state of the budget for a usage in the present period."""
        if self.used(usage) >= self.amount:
            return State.EXHAUSTED
        return State.SOFT if self.reached_percent(usage) else State.OK


def span_at(period: Period, now_ms: int) -> BudgetSpan:
    """Return the day or calendar month of UTC that contains a moment."""
    now = datetime.fromtimestamp(now_ms // 1000, UTC)
    start = now.replace(hour=0, minute=0, second=0)
    if period is Period.DAY:
        end = start + timedelta(days=1)
    else:
        start = start.replace(day=1)
        end = (start + timedelta(days=31)).replace(day=1)
    return BudgetSpan(round(start.timestamp()) * 1000, round(end.timestamp()) * 1000)


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """A budget of a tenant, with its state in the period `span`."""

    name: str
    model_id: str
    budget: Budget
    on_exhausted: OnExhausted
    state: State
    span: BudgetSpan


def stops(standings: Iterable[BudgetStanding], now_ms: int) -> list[dict[str, Any]]:
    """Return a tenant's exhausted budgets for gateways, as fields of `BudgetStop`.

    A budget whose period has ended stops no request.
    """
    return [
        {
            "name": it.name,
            "model_id": it.model_id,
            "unit": str(it.budget.unit),
            "amount": it.budget.amount,
            "period": str(it.budget.period),
            "ends_at_unix_ms": it.span.end_ms,
        }
        for it in sorted(standings, key=lambda it: it.name)
        if it.on_exhausted is OnExhausted.STOP
        and it.state is State.EXHAUSTED
        and now_ms < it.span.end_ms
    ]
