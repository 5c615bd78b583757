"""Reads the replica-hours that the control plane has recorded, again for each query of costs."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sluice.certificates import http_options
from sluice.errors import ErrorCode, RejectedError
from sluice.identity import CertificateRole
from telemetry.costs.model import HOUR_MS, Recorded

# longest time for all pages, in seconds, since the control plane may take 4 s for a page
_DEADLINE_S = 8.0
_PAGE_ROWS = 10_000
_ROWS_MAX = 100_000


class _HoursRow(BaseModel):
    """A row of `GET /v1/replica-hours`. Unknown fields of newer control planes are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    start: datetime
    name: str
    accelerator_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    unassigned_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Page(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    data: list[_HoursRow]
    has_more: bool


class RecordedHours:
    """A client for the control plane's replica-hours, which `async with` opens and closes."""

    def __init__(self, url: str, key: str) -> None:
        """Create a client that connects at the first request.

        Args:
            url: http(s)://host:port of the control plane's REST API, or empty if there is none.
            key: Admin key with the viewer role.
        """
        self._url = url.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"}, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def of(self, span_ms: tuple[int, int]) -> list[Recorded]:
        """Return the recorded hours of a time range, by hour and pool.

        Raises:
            RejectedError: The control plane cannot be reached, is too slow, or answers with an
                error. The text names the remedy.
        """
        if not self._url:
            raise _unknown("TELEMETRY__CONTROL_PLANE_URL is not set")
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._pages(span_ms)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unknown(f"the control plane does not answer: {error!r}") from error
        except ValidationError as error:
            raise _unknown("the answer of the control plane is not understood") from error

    async def _pages(self, span_ms: tuple[int, int]) -> list[Recorded]:
        assert self._session is not None, "not opened"
        begin, end = (datetime.fromtimestamp(it / 1000, UTC).isoformat() for it in span_ms)
        query = {"by": "hour", "from": begin, "to": end, "limit": str(_PAGE_ROWS)}
        found: list[Recorded] = []
        while True:
            url = f"{self._url}/v1/replica-hours"
            tls = http_options(CertificateRole.CONTROL_PLANE)
            async with self._session.get(url, params=query, **tls) as response:
                body = await response.read()
                if response.status != 200:
                    text = body[:200].decode(errors="replace")
                    raise _unknown(f"the control plane answers {response.status}: {text}")
            page = _Page.model_validate_json(body)
            found += [
                Recorded(_hour_ms(row.start), row.name, row.accelerator_hours, row.unassigned_hours)
                for row in page.data
            ]
            if not page.has_more or not page.data:
                return found
            if len(found) >= _ROWS_MAX:
                raise _unknown(f"there are more than {_ROWS_MAX} hours of pools: ask for less time")
            query["after"] = page.data[-1].id


def _hour_ms(at: datetime) -> int:
    return int(at.timestamp() * 1000) // HOUR_MS * HOUR_MS


def _unknown(why: str) -> RejectedError:
    message = f"{why}; replica-hours are needed for pools whose price list entry has no `replicas`"
    return RejectedError(ErrorCode.UNAVAILABLE, message, retry_after_s=2.0)
