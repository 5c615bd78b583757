"""Queries the telemetry service for operators, who need no key for that service."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from control_plane.telemetry_client import FeedDownError, open_session, read_bounded
from sluice.certificates import http_options
from sluice.identity import CertificateRole

DEADLINE_S = 10.0
_RELAYED = frozenset({200, 400, 404})


@dataclass(frozen=True, slots=True)
class TelemetryAnswer:
    """An answer of the telemetry service, or its refusal of a query (400, 404)."""

    status: int
    content_type: str
    body: bytes


class TelemetryReader:
    """A client with one session. If no service is configured, every query fails with the reason."""

    def __init__(self, session: aiohttp.ClientSession | None, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def get(
        self, path: str, query: Mapping[str, str], deadline_s: float = DEADLINE_S
    ) -> TelemetryAnswer:
        """Return the answer to a GET.

        Args:
            path: Path below the service's address, with quoted values.
            query: Query parameters, whose empty values are left out.
            deadline_s: Seconds for the whole answer.

        Raises:
            FeedDownError: The service does not answer.
        """
        if self._session is None:
            raise FeedDownError("CONTROL_PLANE__TELEMETRY_URL is not set: set it to see requests")
        url, params = f"{self._url}{path}", {name: it for name, it in query.items() if it}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.get(
                    url,
                    params=params,
                    timeout=aiohttp.ClientTimeout(total=deadline_s),
                    **http_options(CertificateRole.TELEMETRY),
                ) as response,
            ):
                body = await read_bounded(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise FeedDownError(f"telemetry does not answer: {type(error).__name__}") from error
        if response.status not in _RELAYED:
            raise FeedDownError(f"telemetry answers {response.status}")
        return TelemetryAnswer(response.status, response.content_type, body)


# The reader of a control plane without a telemetry service.
NO_TELEMETRY = TelemetryReader(None, "")


@asynccontextmanager
async def open_reader(telemetry_url: str, telemetry_key: str) -> AsyncGenerator[TelemetryReader]:
    """Open a reader. The service need not run yet, and an empty URL means no service."""
    if not telemetry_url:
        yield NO_TELEMETRY
        return
    async with open_session(telemetry_key, DEADLINE_S) as session:
        yield TelemetryReader(session, telemetry_url)
