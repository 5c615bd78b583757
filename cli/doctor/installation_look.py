"""Queries the processes of an installation and its database, each with a deadline."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from cli.api import trust
from cli.doctor.database_look import look_at_database
from cli.doctor.installation import InstallationFacts, ServiceFacts
from cli.top_scrape import parse

_TIMEOUT_S = 3.0
_PAGE_BYTES_MAX = 8 << 20
# Paths of tenants, of nodes and of the audit log. A publisher's key may read only the first path.
_READ = ("/v1/tenants", "/v1/nodes", "/v1/audit")
_AGES = ("gateway_control_age_seconds", "router_control_age_seconds")
_CONNECTED = "agent_control_connected"
# Assumed silence of an unconnected agent in seconds, because it reports no time of its last
# contact.
_UNCONNECTED_S = 3600.0


async def look_at_installation(
    pages: Mapping[str, str],
    *,
    public_url: str,
    admin_url: str,
    admin_key: str,
    telemetry_url: str,
    database_url: str,
    certificates: Sequence[Path],
) -> InstallationFacts:
    """Return the facts of an installation, by reading only.

    Args:
        pages: URLs of metrics, by the name of the process.
        public_url: URL of the OpenAI API, with `/v1`. If empty, the API is not queried.
        admin_url: URL of the control plane.
        admin_key: Key for the control plane.
        telemetry_url: URL of telemetry. If empty, telemetry is not queried.
        database_url: URL of PostgreSQL. If empty, PostgreSQL is not queried.
        certificates: Certificate files of this machine.
    """
    verify = trust()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=verify, trust_env=False) as http:
        asked = [_service(http, "control-plane", admin_url, "/openapi.json")]
        if public_url:
            asked.append(_service(http, "gateway", public_url.removesuffix("/v1"), "/version"))
        if telemetry_url:
            asked.append(_service(http, "telemetry", telemetry_url, ""))
        services = [*await asyncio.gather(*asked)]
        scraped = await asyncio.gather(*(_page(http, *page) for page in pages.items()))
        refused, silent = await _admin(http, admin_url, admin_key)
    return InstallationFacts(
        version=version("sluice"),
        services=[*services, *scraped],
        refused=refused,
        silent=silent,
        certificates=[(str(file), _certificate(file)) for file in certificates],
        database=await look_at_database(database_url) if database_url else None,
    )


async def _service(http: httpx.AsyncClient, name: str, url: str, version_path: str) -> ServiceFacts:
    """Query readiness, clock and version of a service."""
    problem, ahead, told = "", None, ""
    try:
        began_s = time.time()
        ready = await http.get(f"{url}/readyz")
        ahead = _ahead_s(ready, began_s, time.time())
        if ready.status_code != 200:
            problem = f"not ready: {ready.text.strip()[:120]}"
        if version_path:
            told = _version(await http.get(f"{url}{version_path}"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = f"does not answer ({type(error).__name__})"
    return ServiceFacts(name=name, url=url, problem=problem, version=told, clock_ahead_s=ahead)


def _version(answer: httpx.Response) -> str:
    try:
        body: dict[str, Any] = answer.json()
        return str(body.get("version") or body["info"]["version"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _ahead_s(answer: httpx.Response, began_s: float, ended_s: float) -> float | None:
    """Return a clock's lead in seconds, 0 if the exchange itself may explain the difference."""
    try:
        told_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    if told_s > ended_s:
        return told_s - ended_s
    return min(0.0, told_s + 1 - began_s)


async def _page(http: httpx.AsyncClient, name: str, url: str) -> ServiceFacts:
    """Read the age of a process's snapshot from its page of metrics."""
    try:
        ages = [_age_s(sample, value) for sample, _, value in parse(await _read(http, url), {})]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return ServiceFacts(name=name, url=url, problem=f"no metrics ({str(error)[:80]})")
    known = [age for age in ages if age is not None]
    return ServiceFacts(name=name, url=url, snapshot_age_s=max(known, default=None))


async def _read(http: httpx.AsyncClient, url: str) -> str:
    async with http.stream("GET", url) as answer:
        answer.raise_for_status()
        body = bytearray()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > _PAGE_BYTES_MAX:
                raise ValueError(f"a page of more than {_PAGE_BYTES_MAX >> 20} MiB")
    return body.decode()


def _age_s(name: str, value: float) -> float | None:
    if name in _AGES:
        return value
    if name == _CONNECTED:
        return 0.0 if value else _UNCONNECTED_S
    return None


async def _admin(
    http: httpx.AsyncClient, url: str, key: str
) -> tuple[dict[str, int] | None, list[tuple[str, float]]]:
    """Return the paths that the key may not read, and the silent nodes and routers."""
    headers, refused = {"authorization": f"Bearer {key}"}, dict[str, int]()
    try:
        for path in _READ:
            answer = await http.get(f"{url}{path}", headers=headers, params={"limit": 1})
            if answer.status_code in (401, 403):
                refused[path] = answer.status_code
        silent: list[tuple[str, float]] = []
        for kind in ("nodes", "routers"):
            answer = await http.get(f"{url}/v1/{kind}", headers=headers, params={"limit": 1000})
            if answer.status_code == 200:
                silent += _silences(kind, answer)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None, []
    return refused, silent


def _silences(kind: str, answer: httpx.Response) -> list[tuple[str, float]]:
    now_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    rows: list[dict[str, Any]] = answer.json()["data"]
    return [
        (f"{kind[:-1]} {row['id']}", now_s - datetime.fromisoformat(row["seen_at"]).timestamp())
        for row in rows
        if not row.get("is_gone")
    ]


def _certificate(file: Path) -> float | str:
    """Return the seconds until a certificate expires, or the reason why it cannot be read."""
    from cryptography import x509

    try:
        ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        return str(error)
    return (ends - datetime.now(UTC)).total_seconds()
