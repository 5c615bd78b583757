"""Reads token sums of many tenants in one query, by which the control plane enforces budgets."""

import asyncio
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice.errors import BadRequestError, ErrorCode
from telemetry.params import UNIX_MS_MAX
from telemetry.queries import TenantScope
from telemetry.rollups_worker import summed
from telemetry.store import Store

TENANTS_MAX = 500
_MODELS_MAX = 500
_ROWS_MAX = 100_000
_SPAN_MS_MAX = 31 * 86_400_000
_BODY_TIMEOUT_S = 5.0

# Copies for shadow stages are excluded, as in `telemetry.usage`.
_TOTALS = """
SELECT
    tenant_id,
    if(has({{models:Array(String)}}, summed.model), summed.model, '') AS counted,
    sum(requests) AS requests,
    sum(prompt) AS prompt_tokens,
    sum(cached) AS cached_tokens,
    greatest(0, sum(output) - sum(unbilled)) AS output_tokens
FROM ({rows}) AS summed
WHERE NOT is_copy
GROUP BY tenant_id, counted
HAVING sum(summed.requests) > 0
SETTINGS max_execution_time = 15, do_not_merge_across_partitions_select_final = 1,
    max_result_rows = {rows_max}, result_overflow_mode = 'throw'
"""

_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Moment = Annotated[int, Field(ge=0, le=UNIX_MS_MAX)]


class TotalsQuery(BaseModel):
    """A query for token sums of tenants in a time range of Unix milliseconds, end exclusive.

    The range has at most 31 days. A query names at most 500 tenants and 500 models. For each
    tenant, the answer has one sum per named model, and one sum for all other models together.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    from_unix_ms: _Moment
    to_unix_ms: _Moment
    tenant_ids: Annotated[list[_Id], Field(min_length=1, max_length=TENANTS_MAX)]
    models: Annotated[list[_Id], Field(max_length=_MODELS_MAX)]

    @model_validator(mode="after")
    def _is_short(self) -> "TotalsQuery":
        if not 0 < self.to_unix_ms - self.from_unix_ms <= _SPAN_MS_MAX:
            raise ValueError("from_unix_ms must be before to_unix_ms, at most 31 days")
        return self


async def totals_query(request: web.Request) -> TotalsQuery:
    """Return the query in a request's body. Raises BadRequestError for the first invalid part."""
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
    """Return a row per tenant and named model. A row without a name is for all other models.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached, or the result has more than 100,000 rows.
    """
    scope = TenantScope.tenants(*query.tenant_ids)
    rows = await summed(store, (query.from_unix_ms, query.to_unix_ms), scope)
    sql = _TOTALS.format(rows=rows, rows_max=_ROWS_MAX)
    found = await store.query(sql, {**scope.parameters, "models": query.models})
    return [{"model": row.pop("counted"), **row} for row in found]
