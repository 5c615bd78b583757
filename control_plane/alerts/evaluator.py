"""The loop that evaluates alert rules in an installation without Prometheus.

The loop scrapes each target once per interval, and stores in memory the history that the rules
need. Alerts are reported in the form in which a Prometheus reports them. After a restart the
history is empty, so rules over hours have results only after hours.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import structlog
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts import repository
from control_plane.alerts.bodies import ALERTS_MAX, AlertReport
from control_plane.alerts.pages import (
    JOB,
    TARGETS_MAX,
    PageTarget,
    engine_targets,
    page_samples,
    page_targets,
)
from control_plane.alerts.rules import (
    ActiveAlert,
    RuleGroup,
    RulesError,
    RulesOutcome,
    RuleState,
    history_ms,
    rule_groups,
)
from control_plane.database import Database, DatabaseDownError
from control_plane.promql.series import SeriesStore
from control_plane.tables import replicas
from sluice.certificates import http_options, ours
from sluice.identity import CertificateRole

log = structlog.get_logger(__name__)

_FILES = ("recording.yml", "alerts.yml")
_PAGE_TIMEOUT_S = 5.0
_PAGE_BYTES_MAX = 16 << 20
_AT_ONCE = 8
# Largest number of series in memory. A local stack has hundreds of series that rules read. A sample
# has 16 bytes, so 7 h of samples of 20,000 series need less than 600 MB. Only a few series need a
# history of 7 h.
_SERIES_MAX = 20_000
# Seconds between two reports of an alert, as in Prometheus. An alert without a report for five
# minutes has ended.
_REPEAT_S = 60.0
_UP = "up"

Page = tuple[PageTarget, str | None]


def shipped_rules() -> tuple[Path, ...]:
    """Return the platform's rule files from the checkout, or from the wheel without a checkout."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent / "deploy" / "observability" / "prometheus"
    for place in (checkout, package / "_data" / "rules"):
        if all((place / name).exists() for name in _FILES):
            return tuple(place / name for name in _FILES)
    raise RulesError(f"no rules beside {package}: the installation is incomplete")


def read_rules(files: str) -> list[RuleGroup]:
    """Return the rules of the given files, or the platform's rules if no file is given.

    Raises:
        RulesError: A file cannot be read, or has rules that cannot be evaluated here.
    """
    import yaml  # imported here, because most control planes evaluate no rules

    named = tuple(Path(name.strip()) for name in files.split(",") if name.strip())
    groups: list[RuleGroup] = []
    for file in named or shipped_rules():
        try:
            groups += rule_groups(yaml.safe_load(file.read_text()))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RulesError(f"{file}: {error}") from None
    return groups


class RuleEvaluator:
    """Owns the loop that evaluates rules. Without targets the loop ends at once."""

    def __init__(
        self,
        database: Database,
        targets: str,
        files: str,
        interval_s: float,
        show: Callable[[int, int], None] = lambda _series, _failed: None,
        clock: Callable[[], float] = time.time,
        external: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the loop. `run` must be started in a TaskGroup.

        Args:
            database: Database of alerts, and of replicas, whose engines are scraped as well.
            targets: Targets in the form that `page_targets` reads.
            files: Rule files, separated by commas.
            interval_s: Seconds between two rounds.
            show: Called with the number of series and of failed rules in the last round.
            clock: Returns Unix time in seconds.
            external: Labels of the installation, which the texts of rules may use.

        Raises:
            RulesError: The rules cannot be used.
            TargetsError: The targets cannot be used.
        """
        self._database = database
        self._targets = page_targets(targets)
        groups = read_rules(files) if self._targets else []
        self._store = SeriesStore({_UP: 0, **history_ms(groups)}, _SERIES_MAX)
        self._rules = RuleState(groups, self._store, external)
        self._interval_s = interval_s
        self._show = show
        self._clock = clock
        self._known: set[str] = set()
        self._round_ms = 0
        self._told_s: dict[frozenset[tuple[str, str]], float] = {}
        self._ended: list[ActiveAlert] = []
        self._failed: Mapping[str, str] = {}

    async def run(self) -> None:
        """Run the loop until cancelled."""
        if not self._targets:
            return
        async with open_http() as http:
            while True:
                began_s = time.monotonic()
                await self.step(http)
                rest_s = self._interval_s - (time.monotonic() - began_s)
                await asyncio.sleep(max(rest_s, self._interval_s / 10))

    async def step(self, http: aiohttp.ClientSession) -> None:
        """Scrape all targets once, evaluate the rules, and report alerts."""
        limit = asyncio.Semaphore(_AT_ONCE)
        targets = self._targets + await self._engines()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_page(http, target, limit)) for target in targets]
        pages = [task.result() for task in asked]
        now_ms = round(self._clock() * 1000)
        outcome = await asyncio.to_thread(self._evaluate, pages, now_ms)
        self._show(len(self._store), len(outcome.failed))
        for name, why in outcome.failed.items():
            if name not in self._failed:
                log.warning("rule_not_evaluated", rule=name, reason=why)
        self._failed = outcome.failed
        await self._report(outcome)

    async def _engines(self) -> list[PageTarget]:
        """Return the present engines as targets, or no targets while PostgreSQL is down."""
        query = select(replicas.c.id, replicas.c.pool_id, replicas.c.metrics_address)
        query = query.where(replicas.c.metrics_address != "").order_by(replicas.c.id)

        async def read(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query.limit(TARGETS_MAX))).all()

        try:
            rows = await self._database.run_singly(read)
        except (DatabaseDownError, DBAPIError):
            return []
        return engine_targets([(row.id, row.pool_id, row.metrics_address) for row in rows])

    def _evaluate(self, pages: Sequence[Page], now_ms: int) -> RulesOutcome:
        """Store the scraped samples, and evaluate the rules. Runs in a thread."""
        # the clock was set back, so the stored samples are no longer in order
        if now_ms <= self._round_ms:
            self._store.clear()
            self._rules.clear()
        self._round_ms = now_ms
        left_out = sum(self._take(target, text, now_ms) for target, text in pages)
        for gone in self._known - {_source(target) for target, _ in pages}:
            self._store.write(gone, now_ms, ())
        self._known = {_source(target) for target, _ in pages}
        outcome = self._rules.step(now_ms)
        self._store.prune(now_ms)
        if left_out:
            log.warning("series_skipped", count=left_out, most=_SERIES_MAX)
        return outcome

    def _take(self, target: PageTarget, text: str | None, now_ms: int) -> int:
        labels = frozenset(target.labels.items())
        try:
            samples = list(page_samples(text or "", target, self._store.kept_ms))
        except ValueError:
            text, samples = None, []
        samples.append((_UP, labels, float(text is not None)))
        return self._store.write(_source(target), now_ms, samples)

    async def _report(self, outcome: RulesOutcome) -> None:
        """Report the alerts that began or ended, and repeat reports that are a minute old."""
        self._ended = [*self._ended, *outcome.ended][-ALERTS_MAX:]
        now_s = time.monotonic()
        firing = [alert for alert in outcome.active if alert.is_firing]
        due = [it for it in firing if now_s - self._told_s.get(_key(it), -_REPEAT_S) >= _REPEAT_S]
        found = [*_reports(self._ended, self._clock()), *_reports(due[:ALERTS_MAX], None)]
        if not found:
            return
        try:
            await self._database.run(lambda connection: repository.report(connection, found))
        except (DatabaseDownError, DBAPIError) as error:
            log.warning("alerts_not_reported", error=str(getattr(error, "reason", error)))
            return
        self._ended = []
        keys = {_key(alert) for alert in firing}
        self._told_s = {key: at for key, at in self._told_s.items() if key in keys}
        self._told_s |= {_key(alert): now_s for alert in due[:ALERTS_MAX]}


def _source(target: PageTarget) -> str:
    return f"{target.labels[JOB]}/{target.address}{target.path}"


def _key(alert: ActiveAlert) -> frozenset[tuple[str, str]]:
    return frozenset(alert.labels.items())


def _reports(alerts: Sequence[ActiveAlert], ended_s: float | None) -> list[AlertReport]:
    """Return alerts in the form of Prometheus' reports. Invalid alerts are logged and left out."""
    found: list[AlertReport] = []
    for alert in alerts:
        try:
            report = AlertReport(
                labels=dict(alert.labels),
                annotations=dict(alert.annotations),
                startsAt=datetime.fromtimestamp((alert.fires_since_ms or 0) / 1000, UTC),
                endsAt=datetime.fromtimestamp(ended_s, UTC) if ended_s is not None else None,
            )
        except ValidationError as error:
            log.warning("alert_invalid", alert=alert.labels, error=str(error))
            continue
        found.append(report)
    return found


def open_http() -> aiohttp.ClientSession:
    """Return an HTTP session for pages of metrics, with a deadline."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_PAGE_TIMEOUT_S), trust_env=False
    )


def _role(target: PageTarget) -> CertificateRole:
    """Return the role of the process that serves a page. The agent serves the pages of engines."""
    job = target.labels[JOB]
    return CertificateRole.AGENT if job == CertificateRole.ENGINE else CertificateRole(job)


async def _page(http: aiohttp.ClientSession, target: PageTarget, limit: asyncio.Semaphore) -> Page:
    """Return a target with its page, or with None if the target returned no valid page."""
    url = f"{'https' if ours() else 'http'}://{target.address}{target.path}"
    try:
        async with limit, http.get(url, **http_options(_role(target))) as answer:
            answer.raise_for_status()
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _PAGE_BYTES_MAX:
                    return target, None
            return target, body.decode()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return target, None
