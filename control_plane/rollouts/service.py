"""The loop that steps rollouts. A step reads facts, runs the state machine, and writes the results.

Every control plane runs the loop. Each live rollout is claimed by one control plane. If that
control plane is silent for 15 seconds, another control plane claims the rollout. A step reads,
decides and writes in one transaction under a lock on the rollout's row. So two control planes never
step from the same state. A killed process has completed a step or changed nothing, because all
state is in the database.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError, end_frozen
from control_plane.rollouts import effects, facts, repository, trials
from control_plane.rollouts.effects import News, Preparation
from control_plane.rollouts.evidence import Window
from control_plane.rollouts.facts import Facts, GatewayFacts
from control_plane.rollouts.feed import EvidenceFeed
from control_plane.rollouts.machine import due
from control_plane.rollouts.repository import KeptRollout, Taken
from control_plane.rollouts.state import ENDED, UNREADABLE, Phase, Prepare, explain
from control_plane.telemetry_client import FeedDownError
from control_plane.work_poll import MayHaveWork, unknown
from sluice.errors import PlatformError
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_IDLE_S = 2.0  # Seconds between rounds without a live rollout. `wake` ends the pause.
_STEPS_AT_ONCE = 4  # Largest number of concurrent steps. A step uses one of eight connections.
_FEEDS_AT_ONCE = 8
_FEED_TIMEOUT_S = 2.0  # Seconds per rollout. Evidence that arrives later is left to the next step.
_STEP_TIMEOUT_S = 4.0
_PRUNE_INTERVAL_S = 600.0


class GoldenRecords(Protocol):
    """Golden prompts and their results, which `control_plane.quality.repository` reads."""

    def golden_counts(
        self,
        connection: AsyncConnection,
        model_id: str,
        releases: Sequence[str],
        start_ms: int,
        end_ms: int,
    ) -> Awaitable[dict[str, tuple[int, int]]]:
        """Return (runs, mismatches) of a model's releases, in a time range of Unix milliseconds."""
        ...

    def has_expectations(self, connection: AsyncConnection, model_id: str) -> Awaitable[bool]:
        """Return whether a model has golden prompts with an expected answer."""
        ...


class Rollouts:
    """Owns the loop that steps rollouts."""

    def __init__(
        self,
        database: Database,
        evidence: EvidenceFeed,
        fleet: Preparation,
        golden: GoldenRecords,
        show: Callable[[Mapping[str, int], float], None],
        count_rollback: Callable[[str], None],
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        """Create the loop.

        Args:
            database: Database of rollouts.
            evidence: Source of the outcomes of requests. While the source is down, rollouts pause.
            fleet: Prepares the fleet for stages.
            golden: Golden prompts and their results.
            show: Receives two figures for metrics. The first is the number of live rollouts by
                phase, with unreadable rollouts under `UNREADABLE`. The second is the largest age in
                seconds of any rollout's newest evidence.
            count_rollback: Called for every rolled back rollout with the breached gate. Without a
                breached gate, the argument is the reason.
            may_have_work: Tells whether there may be live rollouts.
        """
        self._database = database
        self._may_have_work = may_have_work
        self._evidence = evidence
        self._fleet = fleet
        self._golden = golden
        self._show = show
        self._count_rollback = count_rollback
        self._process = new_id("stepper")
        self._wake = asyncio.Event()
        # reasons why this version cannot read a live rollout, by the rollout's id
        self.unreadable: dict[str, str] = {}
        self._own: dict[str, KeptRollout] = {}  # claimed rollouts, as last read from PostgreSQL
        self._under_way: set[str] = set()
        # ids of rollouts claimed from another process and not stepped since
        self._taken_over: set[str] = set()
        self._without_evidence: set[str] = set()
        self._feeds = asyncio.Semaphore(_FEEDS_AT_ONCE)
        self._steps = asyncio.Semaphore(_STEPS_AT_ONCE)
        self._pruned_at = float("-inf")
        self._has_live = True  # whether the last complete round found a live rollout

    def wake(self) -> None:
        """Start the next round immediately."""
        self._wake.set()

    async def run(self) -> None:
        """Run the loop until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                is_woken = self._wake.is_set()
                self._wake.clear()
                try:
                    if is_woken or self._may_have_work() or not self._is_idle:
                        await self._begin_steps(tasks)
                except (DatabaseDownError, DBAPIError) as error:
                    log.warning("rollouts_step_failed", error=str(getattr(error, "reason", error)))
                try:
                    async with asyncio.timeout(_TICK_S if self._has_live else _IDLE_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    @property
    def _is_idle(self) -> bool:
        """Whether the last round found no live rollout, and old rows were deleted recently."""
        return not self._has_live and time.monotonic() - self._pruned_at <= _PRUNE_INTERVAL_S

    async def _begin_steps(self, tasks: asyncio.TaskGroup) -> None:
        """Step all claimed rollouts concurrently, except rollouts whose last step still runs."""
        if self._is_idle and not await self._database.run_singly(repository.live_phases):
            return
        now_ms, gateways, taken = await self._database.run(self._look)
        self._say_what_is_unreadable(taken)
        self._taken_over |= taken.others
        self._taken_over &= self._own.keys()
        self._without_evidence &= self._own.keys()
        until_ms = facts.evidence_until(gateways, now_ms)
        for kept in taken.own:
            if kept.id not in self._under_way:
                self._under_way.add(kept.id)
                tasks.create_task(self._step_one(kept, until_ms))

    async def _step_one(self, kept: KeptRollout, until_ms: int) -> None:
        """Step one rollout. Its errors do not affect the other rollouts."""
        try:
            windows = await self._windows(kept, until_ms)
            async with self._steps:
                seen = Facts(is_taken_over=kept.id in self._taken_over, windows=windows)
                await self._step(kept, seen)
        except (PlatformError, DBAPIError) as error:
            reason = error.reason if isinstance(error, DatabaseDownError) else str(error)
            log.warning("rollout_step_failed", rollout=kept.id, error=reason)
        except Exception:
            log.exception("rollout_step_broken", rollout=kept.id)
        finally:
            self._under_way.discard(kept.id)

    async def _look(self, connection: AsyncConnection) -> tuple[int, list[GatewayFacts], Taken]:
        """Return the time, the gateways' confirmations, and the claimed rollouts."""
        now_ms = await repository.clock_ms(connection)
        phases = await repository.live_phases(connection)
        taken = Taken([], set(), {})
        if phases:
            await end_frozen(connection)
            taken = await repository.take(connection, self._process)
        seen = {**phases, UNREADABLE: len(taken.unreadable)}
        # A rollout that is being stepped may be locked, so that `take` has skipped it. It stays
        # claimed.
        stepping = {name: kept for name, kept in self._own.items() if name in self._under_way}
        self._own = stepping | {kept.id: kept for kept in taken.own}
        self._has_live = bool(phases or self._own)
        self._show(seen, _evidence_age_s(self._own.values(), now_ms))
        if time.monotonic() - self._pruned_at > _PRUNE_INTERVAL_S:
            await repository.prune_gateways(connection)
            self._pruned_at = time.monotonic()
        gateways = await repository.gateways(connection) if phases else []
        return now_ms, gateways, taken

    def _say_what_is_unreadable(self, taken: Taken) -> None:
        for rollout_id, error in taken.unreadable.items():
            if rollout_id not in self.unreadable:
                log.error("rollout_unreadable", rollout=rollout_id, reason=error.reason)
        found = {rollout_id: error.problem for rollout_id, error in taken.unreadable.items()}
        self.unreadable.clear()
        self.unreadable.update(found)

    async def _windows(self, kept: KeptRollout, until_ms: int) -> tuple[Window, ...]:
        """Return the new evidence for a rollout, which is empty while the feed fails."""
        span = facts.evidence_span(kept.state, kept.created_ms, until_ms)
        if span is None:
            return ()
        try:
            async with asyncio.timeout(_FEED_TIMEOUT_S), self._feeds:
                found = await self._evidence.windows(kept.id, *span)
        except (FeedDownError, TimeoutError) as error:
            if not self._without_evidence:
                log.warning("evidence_lost", rollout=kept.id, reason=str(error) or "no answer yet")
            self._without_evidence.add(kept.id)
            return ()
        except Exception:  # the rollout is still stepped, but without evidence
            log.exception("evidence_broken", rollout=kept.id)
            return ()
        if kept.id in self._without_evidence:
            self._without_evidence.remove(kept.id)
            if not self._without_evidence:
                log.info("evidence_found")
        return found

    async def _step(self, kept: KeptRollout, seen: Facts) -> None:
        """Step one rollout, and log the result."""
        news = await self._database.run(
            lambda connection: self._work(connection, kept.id, seen), deadline_s=_STEP_TIMEOUT_S
        )
        if news is None:
            return
        self._taken_over.discard(kept.id)
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
            if state.phase is Phase.ABORTED and state.reason is not None:
                log.warning("rollout_aborted", **_names(one.kept), reason=state.reason.value)
            if one.is_incident:
                self._raise_incident(one.kept)

    def _raise_incident(self, kept: KeptRollout) -> None:
        verdict, reason = kept.state.verdict, kept.state.reason
        cause = verdict.metric.value if verdict is not None else str(reason)
        why = explain(verdict) if verdict is not None else str(reason)
        log.error("rollout_rolled_back", **_names(kept), cause=cause, why=why)
        self._count_rollback(cause)

    async def _work(
        self, connection: AsyncConnection, rollout_id: str, seen: Facts
    ) -> list[News] | None:
        """Step a rollout in one transaction. Return None if another process has claimed it."""
        kept = await repository.lock_own(connection, rollout_id, self._process)
        if kept is None:
            return None
        now_ms = await repository.clock_ms(connection)
        is_confirmed = await self._is_confirmed(connection, kept, now_ms)
        if kept.state.phase in ENDED:
            if facts.may_settle(kept.state, is_confirmed=is_confirmed):
                await effects.settle(connection, self._fleet, kept)
            return []
        codes = await trials.codes_of(connection, kept.id)
        gone = await repository.gone(connection, kept) or facts.fault(kept.state, codes)
        seen = replace(seen, is_confirmed=is_confirmed, gone=gone)
        if seen.gone is None:
            seen = await self._with_fleet(connection, kept, seen, codes, now_ms)
            has_prompts = await self._golden.has_expectations(connection, kept.model_id)
            windows = await self._with_golden(connection, kept, seen.windows)
            seen = replace(seen, windows=windows, has_prompts=has_prompts)
        _, news = await effects.apply(connection, kept, facts.events(kept.state, seen), now_ms)
        return news

    async def _is_confirmed(
        self, connection: AsyncConnection, kept: KeptRollout, now_ms: int
    ) -> bool:
        """Return whether all gateways follow the present split.

        Only the end of a rollout depends on the answer, so PostgreSQL is queried only if a rollout
        may end.
        """
        if kept.state.phase is not Phase.HALTED and kept.state.phase not in ENDED:
            return False
        gateways = await repository.gateways(connection)
        version = await repository.split_version(connection, kept.model_id)
        return facts.is_confirmed(gateways, version, kept.split_ms, now_ms)

    async def _with_fleet(
        self,
        connection: AsyncConnection,
        kept: KeptRollout,
        seen: Facts,
        codes: frozenset[str],
        now_ms: int,
    ) -> Facts:
        """Request capacity if it is due, and add the readiness of the fleet and of gateways."""
        in_question = facts.stages_in_question(kept.state)
        if not in_question:
            return seen
        both = await effects.both_releases(connection, kept)
        for action in due(kept.state):
            if isinstance(action, Prepare):
                await self._fleet.prepare(connection, *both, action.share)
        stages = kept.state.plan.stages
        gateways = await repository.gateways(connection)
        held = facts.held_stages(kept.state, gateways, both[1].base_digest, now_ms)
        if facts.is_on_trial(kept.state, both[1].adapter_digest, codes):
            held = in_question
        ready = frozenset(
            {
                stage
                for stage in sorted(in_question - held)
                if await self._fleet.is_ready(connection, *both, stages[stage].share)
            }
        )
        return replace(seen, ready=ready, not_ready=in_question - ready)

    async def _with_golden(
        self, connection: AsyncConnection, kept: KeptRollout, windows: Iterable[Window]
    ) -> tuple[Window, ...]:
        """Return the windows with the results of golden prompts added."""
        names = (kept.canary, kept.control)
        found: list[Window] = []
        for window in windows:
            span = (window.start_ms, window.end_ms)
            counts = await self._golden.golden_counts(connection, kept.model_id, names, *span)
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


def _names(kept: KeptRollout) -> dict[str, str]:
    return {
        "rollout": kept.id,
        "model": kept.model_id,
        "control": kept.control,
        "canary": kept.canary,
    }


def _evidence_age_s(own: Iterable[KeptRollout], now_ms: int) -> float:
    """Return the largest age of an open rollout's newest evidence, in seconds."""
    ends = [kept.state.window_end_ms or kept.state.open_ms for kept in own if kept.state.is_open]
    return (now_ms - min(ends)) / 1000 if ends else 0.0
