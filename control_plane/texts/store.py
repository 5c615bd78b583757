"""The store of redacted texts, which is ClickHouse behind the telemetry service."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
from pydantic import TypeAdapter, ValidationError

from control_plane.telemetry_client import FeedDownError, open_session, read_bounded
from sluice.certificates import http_options
from sluice.errors import BadRequestError, ErrorCode
from sluice.identity import CertificateRole
from sluice.ids import is_request_id

DEADLINE_S = 10.0
_ERROR_BYTES_MAX = 200
_Rows = TypeAdapter(dict[str, list[dict[str, Any]]])


class TextStore(Protocol):
    """The store of texts, for the routes."""

    async def find(self, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
        """Return the stored texts of a tenant's request.

        Raises:
            FeedDownError: The store is down.
        """
        ...

    async def erase(self, tenant_id: str) -> None:
        """Erase all texts of a tenant. Raises FeedDownError if the store is down."""
        ...


class NoTexts:
    """The store of a control plane without a telemetry service."""

    async def find(self, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
        """Raise FeedDownError, because no telemetry service is configured."""
        raise FeedDownError(f"no texts of {tenant_id}/{request_id}: {_UNSET}")

    async def erase(self, tenant_id: str) -> None:
        """Raise FeedDownError, because no telemetry service is configured."""
        raise FeedDownError(f"no texts of {tenant_id}: {_UNSET}")


_UNSET = "CONTROL_PLANE__TELEMETRY_URL is not set"
NO_TEXTS = NoTexts()


@asynccontextmanager
async def open_store(telemetry_url: str, telemetry_key: str) -> AsyncGenerator[TextStore]:
    """Open a store. The telemetry service need not run yet.

    Args:
        telemetry_url: URL of the telemetry service, or empty if there is no service.
        telemetry_key: Admin key for the service.
    """
    if not telemetry_url:
        yield NO_TEXTS
        return
    async with open_session(telemetry_key, DEADLINE_S) as session:
        yield TelemetryTexts(session, telemetry_url)


class TelemetryTexts:
    """Queries the telemetry service (`/v1/texts`)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/v1/texts"

    async def find(self, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
        """Return the stored texts. Raises BadRequestError if the id is not valid.

        The id is checked here because the caller sent it, and because this request has a key for
        all of telemetry. So the id must not contain a further path segment.
        """
        if not is_request_id(request_id):
            message = "request_id: 1 to 128 of A-Z a-z 0-9 . _ : - are expected"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="request_id")
        url = f"{self._url}/{quote(request_id, safe='')}"
        try:
            rows = _Rows.validate_json(await self._fetch("GET", url, tenant_id))["data"]
        except (ValidationError, KeyError) as error:
            raise FeedDownError(f"{self._url} is not understood") from error
        if any(row.get("tenant_id") != tenant_id for row in rows):
            raise FeedDownError(f"{self._url} answers about another tenant than was asked for")
        return rows

    async def erase(self, tenant_id: str) -> None:
        """Erase all texts of a tenant. Raises BadRequestError if the tenant's id is not valid."""
        await self._fetch("DELETE", self._url, tenant_id)

    async def _fetch(self, method: str, url: str, tenant_id: str) -> bytes:
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self._session.request(
                    method,
                    url,
                    params={"tenant": tenant_id},
                    **http_options(CertificateRole.TELEMETRY),
                ) as response,
            ):
                body = await read_bounded(response)
                if response.status == 400:
                    said = body[:_ERROR_BYTES_MAX].decode(errors="replace")
                    raise BadRequestError(ErrorCode.INVALID_REQUEST, f"telemetry says: {said}")
                if response.status != 200:
                    raise FeedDownError(f"{self._url} answers {response.status}")
                return body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise FeedDownError(f"{self._url} does not answer: {type(error).__name__}") from error
