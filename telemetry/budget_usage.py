"""Sums of the ledger for many tenants at once, by which the control plane follows their budgets."""

import asyncio
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice.errors import BadRequestError, ErrorCode
from telemetry.params import UNIX_MS_MAX
from telemetry.store import Store
from telemetry.usage import PROMPT_COUNTS

TENANTS_MAX = 500
_ROWS_MAX = 50_000
_SPAN_MS_MAX = 31 * 86_400_000
_BODY_TIMEOUT_S = 5.0

# As in `telemetry.usage`: FINAL, and no copies.
_TOTALS = f"""
SELECT
    tenant_id,
    model,
    count() AS requests,
    sumIf(prompt, {PROMPT_COUNTS}) AS prompt_tokens,
    sum(cached) AS cached_tokens,
    sum(output) AS output_tokens
FROM (
    SELECT
        tenant_id, model, status, endpoint, replica_id,
        prompt_tokens AS prompt, cached_tokens AS cached, output_tokens AS output
    FROM requests FINAL
    WHERE tenant_id IN {{tenants:Array(String)}}
        AND received_at >= fromUnixTimestamp64Milli({{from_ms:Int64}}, 'UTC')
        AND received_at < fromUnixTimestamp64Milli({{to_ms:Int64}}, 'UTC')
        AND NOT is_copy
)
GROUP BY tenant_id, model
SETTINGS max_execution_time = 15, do_not_merge_across_partitions_select_final = 1,
    max_result_rows = {_ROWS_MAX}, result_overflow_mode = 'throw'
"""  # noqa: S608 - of constants

_Moment = Annotated[int, Field(ge=0, le=UNIX_MS_MAX)]


class TotalsQuery(BaseModel):
    """What is asked for: tenants, and a span of Unix milliseconds without its end.

    At most 31 days and `TENANTS_MAX` tenants.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    from_unix_ms: _Moment
    to_unix_ms: _Moment
    tenant_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(min_length=1, max_length=TENANTS_MAX),
    ]

    @model_validator(mode="after")
    def _is_short(self) -> "TotalsQuery":
        if not 0 < self.to_unix_ms - self.from_unix_ms <= _SPAN_MS_MAX:
            raise ValueError("from_unix_ms must be before to_unix_ms, at most 31 days")
        return self


async def totals_query(request: web.Request) -> TotalsQuery:
    """Return what a body asks for; BadRequestError names its first mistake."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return TotalsQuery.model_validate_json(await request.read())
    except TimeoutError:
        message = f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"{field}: {first['msg']}" if field else first["msg"]
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=field or None) from None


async def totals(store: Store, query: TotalsQuery) -> list[dict[str, Any]]:
    """Return a row per tenant and model that was used.

    Raises:
        STORE_ERRORS: ClickHouse is away, or there are more than 50,000 rows.
    """
    parameters = {
        "tenants": query.tenant_ids,
        "from_ms": query.from_unix_ms,
        "to_ms": query.to_unix_ms,
    }
    return await store.query(_TOTALS, parameters)
