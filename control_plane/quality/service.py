"""The quality guard's loop, which judges replicas by their answers to golden prompts.

Every control plane runs the loop. Each control plane sends the prompts to its agents, stores their
answers, and judges answers that no other control plane has claimed. No client's request waits for
the loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import ERRORS, Database, DatabaseDownError
from control_plane.fields import is_id
from control_plane.quality import ejection_rows, repository, suspicion_rows
from control_plane.quality.base_prompts import TokenIds
from control_plane.quality.board import Board, Prompts
from control_plane.quality.ejections import Ejection, ejections_of
from control_plane.quality.inbox import Inbox
from control_plane.quality.judging import Judge, JudgingOutcome, log_quarantine
from control_plane.quality.repository import AnswerReport
from control_plane.quality.shares import round_of
from control_plane.quality.verdicts import Alert, Group, ReplacementBudget, Ruling
from control_plane.watch.feed import Feed
from sluice.detector.consensus import Text
from sluice.wire.agent.v1 import agent_pb2 as wire
from sluice.wire.control.v1 import control_pb2 as control

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_ACCUSE_S = 1.5  # Deadline in seconds. A router waits for 2 s, and then repeats its report.
_IDLE_S = 5.0  # seconds between two searches for answers that other control planes stored
_ALERT_S = 900.0  # seconds after which an alert ends unless it is raised again
_TOKENS_MAX = 64  # largest number of tokens that are stored of an answer
_ERROR_MAX = 500
_PRUNE_INTERVAL_S = 600.0
_ALERTS_MAX = 8192  # Largest number of remembered alerts. The oldest are dropped first.
_REFRESH_S = 0.5  # seconds between two updates of the prompts while the state changes continuously
# pause as a multiple of the last update's duration, so that updates use little processor time
_REST = 20.0
_ADVICE = {
    "pool": "it is not replaced within the hour: look at `sluice fleet quarantines`, release what"
    " is sound, and raise CONTROL_PLANE__QUALITY_POOL_HOUR_MAX if so many are broken",
    "node": "the node gets no new replica within a day: its hardware may be broken; release what is"
    " sound (`sluice fleet release`)",
}


class Meter(Protocol):
    """A receiver of figures for metrics."""

    def count_deviations(self, difference: str, count: int) -> None:
        """Count answers that deviate."""
        ...

    def count_quarantines(self, count: int) -> None:
        """Count replicas that are quarantined."""
        ...

    def count_held(self, budget: str) -> None:
        """Count a quarantined replica that is not replaced because of a budget."""
        ...

    def count_failure(self) -> None:
        """Count a pool and prompt that could not be judged."""
        ...

    def count_dropped(self, reason: str) -> None:
        """Count an answer that could not be stored."""
        ...

    def show_quality(self, alerts: Mapping[str, int]) -> None:
        """Set the number of open alerts by kind."""
        ...


class Quality:
    """Owns the loop of the quality guard."""

    def __init__(
        self,
        database: Database,
        feed: Feed,
        meter: Meter,
        budget: ReplacementBudget,
        unix_s: Callable[[], float] = time.time,
        token_ids: Callable[[], TokenIds] = dict,
    ) -> None:
        """Create the loop. `run` must be started in a TaskGroup.

        Args:
            database: Database of answers.
            feed: Source of the models' releases.
            meter: Receives figures for metrics.
            budget: Limits on the replacement of quarantined replicas.
            unix_s: Returns Unix time in seconds, which determines the round of prompts.
            token_ids: Returns the token ids of the default prompts, in the form that
                `askings.defaults` reads.
        """
        self._judge = Judge(database, budget)
        self._unix_s = unix_s
        self._token_ids = token_ids
        self._database = database
        self._feed = feed
        self._meter = meter
        self._prompts: Prompts = ()
        self._known: tuple[int, Prompts, TokenIds] | None = None
        self._board = Board()
        self._mark: tuple[int, int] | None = None
        self._refresh_at_s = 0.0
        self._judge_at_s = float("-inf")
        self._reports = Inbox(database, meter.count_dropped)
        self._alerts: dict[Group, tuple[float, Mapping[Alert, tuple[str, ...]]]] = {}
        self._pruned_at = time.monotonic()
        self._accused: Mapping[str, Ejection] = {}
        self._suspected: Mapping[str, int] = {}

    def prompts_for(self, bases: Iterable[str]) -> list[wire.GoldenPrompt]:
        """Return the prompts of the present round for a node whose replicas have these bases."""
        self._refresh()
        return self._board.prompts_of(bases, round_of(self._unix_s()))

    def accused_at_unix_ms(self, replica_id: str) -> int:
        """Return the Unix time (ms) of a replica's open ejection, or 0 if no ejection is open."""
        found = self._accused.get(replica_id)
        return 0 if found is None else found.ejected_at_unix_ms

    def suspected_at_unix_ms(self, replica_id: str) -> int:
        """Return the Unix time (ms) at which a suspect last had to stay in service, or 0."""
        return self._suspected.get(replica_id, 0)

    async def accuse(self, request: control.AccuseRequest) -> None:
        """Store a router's report of replicas that it ejected for wrong answers.

        Raises:
            DatabaseDownError: The report was not stored.
            ValueError: The report is not valid.
        """
        found = ejections_of(request)
        new = await self._database.run(
            lambda connection: ejection_rows.add(connection, found), deadline_s=_ACCUSE_S
        )
        for one in new:
            log.error("replica_accused", replica=one.replica_id, **one.shown())

    def take(self, message: wire.SyncRequest) -> None:
        """Queue the answers that an agent reports, without blocking."""
        is_known_node = is_id(message.node_id)
        for result in message.golden_results:
            if not (is_known_node and is_id(result.replica_id)):
                self._meter.count_dropped("id")
                continue
            asking = self._board.askings.get(result.prompt_id)
            if asking is None:  # the prompt was removed after it was sent
                continue
            text = Text(
                tuple(token for token in result.token_ids[:_TOKENS_MAX] if token < 2**31),
                tuple(result.logprobs[:_TOKENS_MAX]),
            )
            error = result.error[:_ERROR_MAX].replace("\0", "")
            if not text.token_ids and not error:
                error = "an empty answer"
            asked_ms = min(result.asked_at_unix_ms, 2**62)
            self._reports.put(
                AnswerReport(
                    message.node_id,
                    result.replica_id,
                    asking,
                    None if error else text,
                    error,
                    asked_ms,
                )
            )

    async def run(self) -> None:
        """Run the loop until cancelled."""
        while True:
            try:
                if self._feed.is_loaded:
                    await self._step()
            except (DatabaseDownError, *ERRORS) as error:
                log.warning("quality_step_failed", error=str(getattr(error, "reason", error)))
            await asyncio.sleep(_TICK_S)

    async def _step(self) -> None:
        await self._database.run_singly(self._read)
        self._refresh()
        has_news = bool(self._reports.waiting)
        try:
            await self._reports.write()
        # The step continues, because answers that were stored earlier can still be judged.
        except (DatabaseDownError, *ERRORS) as error:
            log.warning("answers_not_written", error=str(getattr(error, "reason", error)))
        now_s = time.monotonic()
        if has_news or now_s >= self._judge_at_s:
            outcomes = await self._judge.turn(self._board.askings)
            is_idle = not any(it.judged or it.failures or not it.is_last for it in outcomes)
            self._judge_at_s = now_s + (_IDLE_S if is_idle else _TICK_S / 2)
            for outcome in outcomes:
                self._log_outcome(outcome)
        counts = dict.fromkeys(map(str, Alert), 0)
        for group, (at_s, alerts) in list(self._alerts.items()):
            if now_s - at_s > _ALERT_S:
                del self._alerts[group]
                continue
            for alert in alerts:
                counts[str(alert)] += 1
        counts[str(Alert.UNJUDGED)] = self._judge.deferrals.parked
        self._meter.show_quality(counts)
        if now_s - self._pruned_at > _PRUNE_INTERVAL_S:
            self._pruned_at = now_s
            kept = frozenset(self._board.askings)
            await self._database.run(lambda connection: repository.prune(connection, kept))
            await self._database.run(ejection_rows.prune)
            await self._database.run(suspicion_rows.prune)

    async def _read(self, connection: AsyncConnection) -> None:
        """Read the changed prompts, and the replicas that routers or the guard accuse."""
        mark, is_accused, is_suspected = await repository.news_mark(connection)
        if mark != self._mark:
            self._prompts = await repository.prompts(connection)
            self._mark = mark
        self._accused = await ejection_rows.accused(connection) if is_accused else {}
        self._suspected = await suspicion_rows.suspected(connection) if is_suspected else {}

    def _log_outcome(self, outcome: JudgingOutcome) -> None:
        """Log and count the decisions of a batch."""
        ruling = outcome.ruling
        for replica_id in outcome.cleared:
            log.info("replica_cleared", replica=replica_id)
        for case in ruling.quarantines:
            log_quarantine(case)
        self._meter.count_quarantines(len(ruling.quarantines))
        for _ in outcome.failures:
            self._meter.count_failure()
        for difference, count in ruling.deviations.items():
            self._meter.count_deviations(difference, count)
        now_s = time.monotonic()
        self._log_held(ruling)
        for group, alerts in ruling.alerts.items():
            before = self._alerts.pop(group, (0.0, {}))[1]
            if alerts:
                self._alerts[group] = now_s, alerts
            for alert, names in alerts.items():
                if before.get(alert) != names:
                    pool, asking = group
                    level = log.warning if alert is Alert.TENANT else log.error
                    level(
                        "quality_alert",
                        alert=str(alert),
                        pool=pool,
                        asking=asking,
                        replicas=list(names),
                    )
        while len(self._alerts) > _ALERTS_MAX:
            del self._alerts[next(iter(self._alerts))]

    def _log_held(self, ruling: Ruling) -> None:
        """Count and log the quarantined replicas that are not replaced because of a budget."""
        for one in ruling.held:
            self._meter.count_held(one.budget)
            log.error(
                "quarantine_held",
                replica=one.replica_id,
                pool=one.pool_id,
                node=one.node_id,
                budget=one.budget,
                advice=_ADVICE[one.budget],
            )

    def _refresh(self) -> None:
        """Recompute the askings when the state or the prompts have changed."""
        token_ids, now_s = self._token_ids(), time.monotonic()
        known = self._feed.state.version, self._prompts, token_ids
        if known != self._known and now_s >= self._refresh_at_s:
            self._known = known
            self._board.update(self._feed.state, self._prompts, token_ids)
            ended_s = time.monotonic()
            self._refresh_at_s = ended_s + max(_REFRESH_S, _REST * (ended_s - now_s))
