"""Reads usage from the ledger of the telemetry service, as sums."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Protocol

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from control_plane.budgets.model import BudgetSpan, Usage
from control_plane.telemetry_client import FeedDownError, open_session, read_bounded
from sluice.certificates import http_options
from sluice.identity import CertificateRole

# Deadline in seconds. The sums of a month of a large fleet are computed on request.
DEADLINE_S = 20.0
ASKED_MAX = 500  # largest number of tenants per request, and of models per request


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger's usage of some tenants in one time range.

    Attributes:
        usage: Usage by tenant and answering model. The empty model name has the usage of all models
            without a separate sum.
        ingested_until_ms: Unix time in milliseconds up to which the ledger has all events. Zero
            means unknown.
    """

    usage: Mapping[tuple[str, str], Usage]
    ingested_until_ms: int

    def by_tenant(self) -> Mapping[str, Usage]:
        """Return the usage by tenant, summed over models."""
        found: defaultdict[str, Usage] = defaultdict(Usage)
        for (tenant_id, _), usage in self.usage.items():
            found[tenant_id] += usage
        return found


class UsageFeed(Protocol):
    """A source of usage for the loop of budgets."""

    async def usage(
        self, span: BudgetSpan, tenant_ids: Collection[str], models: Collection[str]
    ) -> Ledger:
        """Return the usage of tenants, without entries for tenants that have no usage.

        Args:
            span: Time range of the sums.
            tenant_ids: Ids of tenants, at most `ASKED_MAX`.
            models: Models with separate sums, at most `ASKED_MAX`.

        Raises:
            FeedDownError: The service is down or slow, or its answer is not valid.
        """
        ...


class NoUsage:
    """The feed of a control plane without a telemetry service."""

    async def usage(
        self, span: BudgetSpan, tenant_ids: Collection[str], models: Collection[str]
    ) -> Ledger:
        """Raise FeedDownError, because no telemetry service is configured."""
        raise FeedDownError(
            f"no usage of {len(tenant_ids)} tenants and {len(models)} models since"
            f" {span.start_ms}: "
            "CONTROL_PLANE__TELEMETRY_URL is not set"
        )


@asynccontextmanager
async def open_feed(telemetry_url: str, telemetry_key: str) -> AsyncGenerator[UsageFeed]:
    """Open a feed. The telemetry service need not run yet.

    Args:
        telemetry_url: URL of the telemetry service, or empty if there is no service.
        telemetry_key: Admin key for the service.
    """
    if not telemetry_url:
        yield NoUsage()
        return
    async with open_session(telemetry_key, DEADLINE_S) as session:
        yield TelemetryUsage(session, telemetry_url)


class TelemetryUsage:
    """Queries the telemetry service (`POST /v1/usage/totals`)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/v1/usage/totals"

    async def usage(
        self, span: BudgetSpan, tenant_ids: Collection[str], models: Collection[str]
    ) -> Ledger:
        """Return the usage of the tenants."""
        assert max(len(tenant_ids), len(models)) <= ASKED_MAX, (len(tenant_ids), len(models))
        asked = {
            "from_unix_ms": span.start_ms,
            "to_unix_ms": span.end_ms,
            "tenant_ids": sorted(tenant_ids),
            "models": sorted(models),
        }
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self._session.post(
                    self._url, json=asked, **http_options(CertificateRole.TELEMETRY)
                ) as response,
            ):
                body = await read_bounded(response)
                if response.status != 200:
                    text = body[:200].decode(errors="replace")
                    raise FeedDownError(f"{self._url} answers {response.status}: {text}")
                answer = _Answer.model_validate_json(body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise FeedDownError(f"{self._url} does not answer: {error!r}") from error
        except ValidationError as error:
            raise FeedDownError(f"{self._url} is not understood: {error}") from error
        if not {row.tenant_id for row in answer.data} <= set(tenant_ids):
            raise FeedDownError(f"{self._url} answers about other tenants than were asked for")
        usage = {(row.tenant_id, row.model): row.usage() for row in answer.data}
        return Ledger(usage, answer.ingested_until_unix_ms)


_Number = Annotated[int, Field(ge=0)]


class _AnswerPart(BaseModel):
    """The fields of an answer that are read. A newer telemetry service may send more fields."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _UsageRow(_AnswerPart):
    tenant_id: str
    model: str
    requests: _Number
    prompt_tokens: _Number
    cached_tokens: _Number
    output_tokens: _Number

    def usage(self) -> Usage:
        sums = (self.prompt_tokens, self.cached_tokens, self.output_tokens)
        return Usage(self.requests, *sums)


class _Answer(_AnswerPart):
    ingested_until_unix_ms: _Number
    data: list[_UsageRow]
