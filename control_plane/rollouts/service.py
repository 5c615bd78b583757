"""The loop that steps rollouts: reads what the world is like, tells the machine, writes it down.

Every control plane runs it; each live rollout is taken by one of them, and by another when that was
silent for some seconds. A step reads, decides and writes in one transaction under the lock on the
rollout's row, so two can never step from the same state, and a process that is killed has either
done all of a step or nothing. Nothing is kept in memory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError, end_frozen
from control_plane.rollouts import effects, facts, repository
from control_plane.rollouts.effects import News, Preparation
from control_plane.rollouts.evidence import Window
from control_plane.rollouts.facts import Facts, Gateway
from control_plane.rollouts.feed import EvidenceFeed, FeedDownError
from control_plane.rollouts.machine import due
from control_plane.rollouts.repository import Kept, Taken
from control_plane.rollouts.state import ENDED, Phase, Prepare, explain
from sluice.errors import PlatformError
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_FEED_TIMEOUT_S = 2.0  # for all rollouts; they are stepped without what comes later
_FEEDS_AT_ONCE = 8
_PRUNE_INTERVAL_S = 600.0

GoldenCounts = Callable[
    [AsyncConnection, str, Sequence[str], int, int], Awaitable[dict[str, tuple[int, int]]]
]


class Rollouts:
    """Owns the loop."""

    def __init__(
        self,
        database: Database,
        evidence: EvidenceFeed,
        fleet: Preparation,
        golden: GoldenCounts,
        show: Callable[[Mapping[str, int], float], None],
        count_rollback: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            database: Where the rollouts are.
            evidence: What requests came to; while nobody knows, rollouts pause.
            fleet: Gets ready for stages.
            golden: What golden prompts came to, per release.
            show: Takes how many live rollouts are in which phase, and how old (seconds) the newest
                evidence is of the rollout that has the oldest, for metrics.
            count_rollback: Is told of every rollout that is sent back: the gate, else the reason.
        """
        self._database = database
        self._evidence = evidence
        self._fleet = fleet
        self._golden = golden
        self._show = show
        self._count_rollback = count_rollback
        self._process = new_id("stepper")
        self._wake = asyncio.Event()
        self._is_feed_up = True
        self._unreadable: frozenset[str] = frozenset()
        self._pruned_at = float("-inf")

    def wake(self) -> None:
        """Step now."""
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._step_all()
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("rollouts_step_failed", error=str(getattr(error, "reason", error)))
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _step_all(self) -> None:
        now_ms, gateways, taken = await self._database.run(self._look)
        self._say_what_is_unreadable(taken)
        found = await self._windows(taken.own, gateways, now_ms)
        for kept in taken.own:
            seen = Facts(is_taken_over=kept.id in taken.others, windows=found.get(kept.id, ()))
            try:
                await self._step(kept, seen)
            except DatabaseDownError as error:
                log.warning("rollout_step_failed", rollout=kept.id, error=error.reason)
                # It may be this rollout alone that waits for something; else nobody can go on.
                await self._database.run(repository.clock_ms)
            except (PlatformError, DBAPIError) as error:
                log.warning("rollout_step_failed", rollout=kept.id, error=str(error))
            except Exception:  # whatever is wrong with it, the others must be watched
                log.exception("rollout_step_broken", rollout=kept.id)

    async def _look(self, connection: AsyncConnection) -> tuple[int, list[Gateway], Taken]:
        """Return time, gateways, and what is ours to step."""
        await end_frozen(connection)
        taken = await repository.take(connection, self._process)
        now_ms = await repository.clock_ms(connection)
        phases = await repository.live_phases(connection)
        self._show(phases, _evidence_age_s(taken.own, now_ms))
        if time.monotonic() - self._pruned_at > _PRUNE_INTERVAL_S:
            await repository.prune_gateways(connection)
            self._pruned_at = time.monotonic()
        return now_ms, await repository.gateways(connection), taken

    def _say_what_is_unreadable(self, taken: Taken) -> None:
        for rollout_id, reason in taken.unreadable.items():
            if rollout_id not in self._unreadable:
                log.error("rollout_unreadable", rollout=rollout_id, reason=reason)
        self._unreadable = frozenset(taken.unreadable)

    async def _windows(
        self, own: Sequence[Kept], gateways: Sequence[Gateway], now_ms: int
    ) -> dict[str, tuple[Window, ...]]:
        """Return the evidence that is new, by rollout; without what cannot be had now."""
        until_ms = facts.evidence_until(gateways, now_ms)
        found: dict[str, tuple[Window, ...]] = {}
        reasons: list[str] = []
        places = asyncio.Semaphore(_FEEDS_AT_ONCE)

        async def read(kept: Kept, after_ms: int, before_ms: int) -> None:
            async with places:
                try:
                    found[kept.id] = await self._evidence.windows(kept.id, after_ms, before_ms)
                except FeedDownError as error:
                    reasons.append(str(error))
                except Exception:  # the same: all others are read
                    log.exception("evidence_broken", rollout=kept.id)

        try:
            async with asyncio.timeout(_FEED_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                # Who lags behind comes first: nobody is always the one for whom no time is left.
                for kept in sorted(own, key=lambda kept: kept.state.window_end_ms):
                    span = facts.evidence_span(kept.state, kept.created_ms, until_ms)
                    if span is not None:
                        tasks.create_task(read(kept, *span))
        except TimeoutError:
            reasons.append("no answer in time")
        self._say_whether_up(reasons)
        return found

    def _say_whether_up(self, reasons: Sequence[str]) -> None:
        if reasons and self._is_feed_up:
            log.warning("evidence_lost", reason=reasons[0])
        elif not reasons and not self._is_feed_up:
            log.info("evidence_found")
        self._is_feed_up = not reasons

    async def _step(self, kept: Kept, seen: Facts) -> None:
        """Step one rollout, and say what came of it."""
        news = await self._database.run(lambda connection: self._work(connection, kept.id, seen))
        for one in news:
            state = one.kept.state
            log.info(
                "rollout_stepped",
                **_names(one.kept),
                event_kind=one.event,
                phase=state.phase.value,
                stage=state.stage,
                share=state.share,
                reason=state.reason.value if state.reason else "",
            )
            if one.is_incident:
                self._raise_incident(one.kept)

    def _raise_incident(self, kept: Kept) -> None:
        verdict, reason = kept.state.verdict, kept.state.reason
        cause = verdict.metric.value if verdict is not None else str(reason)
        why = explain(verdict) if verdict is not None else str(reason)
        log.error("rollout_sent_back", **_names(kept), cause=cause, why=why)
        self._count_rollback(cause)

    async def _work(self, connection: AsyncConnection, rollout_id: str, seen: Facts) -> list[News]:
        """Step a rollout in one transaction; nothing if it is held, or another's by now."""
        kept = await repository.lock_own(connection, rollout_id, self._process)
        if kept is None:
            return []
        now_ms = await repository.clock_ms(connection)
        is_confirmed = await self._is_confirmed(connection, kept, now_ms)
        if kept.state.phase in ENDED:
            if facts.may_settle(kept.state, is_confirmed=is_confirmed):
                await effects.settle(connection, self._fleet, kept)
            return []
        seen = replace(seen, is_confirmed=is_confirmed)
        seen = await self._with_fleet(connection, kept, seen)
        seen = replace(seen, windows=await self._with_golden(connection, kept, seen.windows))
        _, news = await effects.tell(connection, kept, facts.events(kept.state, seen), now_ms)
        return news

    async def _is_confirmed(self, connection: AsyncConnection, kept: Kept, now_ms: int) -> bool:
        """Return whether the gateways decide by the split as it is; asked only at the end."""
        if kept.state.phase is not Phase.HALTED and kept.state.phase not in ENDED:
            return False
        gateways = await repository.gateways(connection)
        version = await repository.split_version(connection, kept.model_id)
        return facts.is_confirmed(gateways, version, kept.split_ms, now_ms)

    async def _with_fleet(self, connection: AsyncConnection, kept: Kept, seen: Facts) -> Facts:
        """Ask the fleet to get ready where that is due, and add what it can serve."""
        in_question = facts.stages_in_question(kept.state)
        if not in_question:
            return seen
        both = await effects.both_releases(connection, kept)
        for action in due(kept.state):
            if isinstance(action, Prepare):
                await self._fleet.prepare(connection, *both, action.share)
        stages = kept.state.plan.stages
        ready = frozenset(
            {
                stage
                for stage in sorted(in_question)
                if await self._fleet.is_ready(connection, *both, stages[stage].share)
            }
        )
        return replace(seen, ready=ready, not_ready=in_question - ready)

    async def _with_golden(
        self, connection: AsyncConnection, kept: Kept, windows: Iterable[Window]
    ) -> tuple[Window, ...]:
        """Return windows with what golden prompts came to meanwhile."""
        names = (kept.canary, kept.control)
        found: list[Window] = []
        for window in windows:
            span = (window.start_ms, window.end_ms)
            counts = await self._golden(connection, kept.model_id, names, *span)
            arms = [
                replace(arm, golden_runs=runs, golden_mismatches=mismatches)
                for arm, (runs, mismatches) in zip(
                    (window.canary, window.control),
                    (counts.get(name, (0, 0)) for name in names),
                    strict=True,
                )
            ]
            found.append(replace(window, canary=arms[0], control=arms[1]))
        return tuple(found)


def _names(kept: Kept) -> dict[str, str]:
    return {
        "rollout": kept.id,
        "model": kept.model_id,
        "control": kept.control,
        "canary": kept.canary,
    }


def _evidence_age_s(own: Iterable[Kept], now_ms: int) -> float:
    """Return how old the newest evidence is of the rollout that has the oldest."""
    ends = [kept.state.window_end_ms or kept.state.open_ms for kept in own if kept.state.is_open]
    return (now_ms - min(ends)) / 1000 if ends else 0.0
