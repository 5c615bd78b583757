"""The quality guard's loop: what is asked, what was answered, and what follows.

Every control plane runs it: each tells its agents the questions and writes down what they answered;
an advisory lock lets one judge at a time. Nobody's request waits for any of it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import ERRORS, Database, DatabaseDownError
from control_plane.quality import repository
from control_plane.quality.askings import Asking, Prompt, by_base, current
from control_plane.quality.consensus import Text
from control_plane.quality.repository import Report
from control_plane.quality.verdicts import Alert, Group, Ruling, rule
from control_plane.watch.feed import Feed
from sluice.ids import new_id
from sluice.wire.agent.v1 import agent_pb2 as wire

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_REPORTS_MAX = 8192  # that wait for the database; the oldest go first
_BATCH = 512
_TOKENS_MAX = 64  # of an answer that is kept
_ERROR_MAX = 500
_PRUNE_INTERVAL_S = 600.0
_ALERT_S = 900.0  # one that is not found again for so long is over


class Meter(Protocol):
    """Takes numbers, for metrics."""

    def count_deviations(self, difference: str, count: int) -> None:
        """Count answers that deviate."""
        ...

    def show_quality(self, quarantined: int, alerts: Mapping[str, int]) -> None:
        """Set how many replicas are in quarantine, and how many alerts of each kind there are."""
        ...


class Quality:
    """Owns the loop."""

    def __init__(self, database: Database, feed: Feed, meter: Meter) -> None:
        """Prepare; `run` belongs into a TaskGroup."""
        self._database = database
        self._feed = feed
        self._meter = meter
        self._prompts: tuple[Prompt, ...] = ()
        self._known: tuple[int, tuple[Prompt, ...]] | None = None
        self._askings: dict[str, Asking] = {}
        self._by_base: dict[str, list[wire.GoldenPrompt]] = {}
        self._reports: deque[Report] = deque(maxlen=_REPORTS_MAX)
        self._alerts: dict[Group, tuple[float, Mapping[Alert, tuple[str, ...]]]] = {}
        self._pruned_at = time.monotonic()

    def prompts_for(self, bases: Iterable[str]) -> list[wire.GoldenPrompt]:
        """Return what replicas of these bases are to be asked."""
        self._refresh()
        return [prompt for base in sorted(set(bases)) for prompt in self._by_base.get(base, ())]

    def take(self, message: wire.SyncRequest) -> None:
        """Take the answers that an agent reports; nothing waits."""
        for result in message.golden_results:
            asking = self._askings.get(result.prompt_id)
            if asking is None:  # it is no question any more
                continue
            text = Text(
                tuple(token for token in result.token_ids[:_TOKENS_MAX] if token < 2**31),
                tuple(result.logprobs[:_TOKENS_MAX]),
            )
            error = result.error[:_ERROR_MAX].replace("\0", "")
            if not text.token_ids and not error:
                error = "an empty answer"
            asked_ms = min(result.asked_at_unix_ms, 2**62)
            self._reports.append(
                Report(
                    message.node_id,
                    result.replica_id,
                    asking,
                    None if error else text,
                    error,
                    asked_ms,
                )
            )

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                if self._feed.is_loaded:
                    await self._step()
            except (DatabaseDownError, *ERRORS) as error:
                log.warning("quality_step_failed", error=str(getattr(error, "reason", error)))
            await asyncio.sleep(_TICK_S)

    async def _step(self) -> None:
        self._prompts = await self._database.run(repository.prompts)
        self._refresh()
        while self._reports:
            batch = [self._reports.popleft() for _ in range(min(_BATCH, len(self._reports)))]
            await self._write(batch)
        ruling = await self._database.run(self._judge)
        if ruling is not None:
            self._tell(ruling)
        quarantined = await self._database.run(repository.quarantined)
        now_s = time.monotonic()
        counts = dict.fromkeys(map(str, Alert), 0)
        for group, (at_s, alerts) in list(self._alerts.items()):
            if now_s - at_s > _ALERT_S:
                del self._alerts[group]
                continue
            for alert in alerts:
                counts[str(alert)] += 1
        self._meter.show_quality(sum(quarantined.values()), counts)
        if now_s - self._pruned_at > _PRUNE_INTERVAL_S:
            self._pruned_at = now_s
            kept = frozenset(self._askings)
            await self._database.run(lambda connection: repository.prune(connection, kept))

    async def _write(self, batch: list[Report]) -> None:
        """Write answers down; those that cannot be written now wait in front of the others."""
        try:
            await self._database.run(lambda connection: repository.add_reports(connection, batch))
        except DatabaseDownError:
            room = _REPORTS_MAX - len(self._reports)
            self._reports.extendleft(reversed(batch[len(batch) - min(room, len(batch)) :]))
            raise

    async def _judge(self, connection: AsyncConnection) -> Ruling | None:
        """Judge what is new, if nobody else does."""
        if not await repository.try_lead(connection):
            return None
        groups = await repository.new_groups(connection)
        if not groups:
            return None
        kept = await repository.answers(connection, groups)
        serving = await repository.serving(connection, (pool for pool, _ in groups))
        truths = await repository.truths(connection, groups)
        quarantined = await repository.quarantined(connection)
        ruling = rule(
            self._askings, kept, serving, truths, quarantined, lambda: new_id("quarantine")
        )
        await repository.learn(connection, ruling.learned)
        await repository.quarantine(connection, ruling.quarantines)
        return ruling

    def _tell(self, ruling: Ruling) -> None:
        """Log and count what was decided."""
        for case in ruling.quarantines:
            log.error(
                "replica_quarantined",
                quarantine=case.id,
                replica=case.replica_id,
                node=case.node_id,
                pool=case.pool_id,
                prompt=case.prompt_id,
                reason=case.reason,
                deviations=case.evidence["deviations"],
                agreeing=case.evidence["agreeing"],
                asked=case.evidence["asked"],
            )
        for difference, count in ruling.deviations.items():
            self._meter.count_deviations(difference, count)
        now_s = time.monotonic()
        for group, alerts in ruling.alerts.items():
            before = self._alerts.pop(group, (0.0, {}))[1]
            if alerts:
                self._alerts[group] = now_s, alerts
            for alert, names in alerts.items():
                if before.get(alert) != names:
                    pool, asking = group
                    log.error(
                        "quality_alert",
                        alert=str(alert),
                        pool=pool,
                        asking=asking,
                        replicas=list(names),
                    )

    def _refresh(self) -> None:
        """Find out what is asked, when the state or the prompts have changed."""
        known = (self._feed.state.version, self._prompts)
        if known != self._known:
            self._askings = current(self._feed.state, self._prompts)
            self._by_base = by_base(self._askings)
            self._known = known
