"""Judges new answers in bounded batches, concurrently with other control planes.

A batch is a transaction that claims answers, so that two control planes never judge the same
answers. A replica is quarantined under a lock and after the serving replicas have been read again,
so that all control planes together respect the limits. If a group (a pool and an asking) cannot be
judged, it is deferred and retried later, while the other groups are judged.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError, is_transient
from control_plane.quality import ejection_rows, repository, suspicion_rows
from control_plane.quality.askings import Asking
from control_plane.quality.clearance import right_answers
from control_plane.quality.deferrals import PARKED_S, Deferrals
from control_plane.quality.judgement import Truth
from control_plane.quality.progress import Progress
from control_plane.quality.repository import ROWS_MAX, Claimed
from control_plane.quality.verdicts import (
    AskingCase,
    Group,
    Quarantine,
    RecordedAnswer,
    ReplacementBudget,
    Ruling,
    Spent,
    examine,
    rule,
)
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_BATCHES_MAX = 8  # Largest number of batches per turn. New answers are stored between two turns.
_DEADLINE_S = 4.0  # deadline of a batch, in seconds
_EXAMINE_S = 1.0  # seconds after the begin of a batch from which no further group is begun
_GROUP_S = 1.0  # seconds from which on a group is to blame if its batch misses the deadline


class TooSlowError(Exception):
    """The judging of a group lasted so long that its batch missed the deadline."""


@dataclass(frozen=True, slots=True)
class JudgingOutcome:
    """The outcome of judging a batch of groups.

    Attributes:
        ruling: Consequences of the judgements.
        failures: Groups that could not be judged, with the reasons.
        judged: Judged groups.
        is_last: Whether no other answers wait to be judged.
        cleared: Replicas that have answered correctly since a router ejected them.
    """

    ruling: Ruling
    failures: Mapping[Group, Exception]
    judged: Sequence[Group]
    is_last: bool
    cleared: tuple[str, ...] = ()


_NOTHING = Ruling((), (), {}, {}, {})


@dataclass(slots=True)
class Judge:
    """Judges batches of answers, and remembers failed groups."""

    database: Database
    budget: ReplacementBudget
    clock: Callable[[], float] = time.monotonic
    deferrals: Deferrals = field(default_factory=Deferrals)

    async def turn(self, askings: Mapping[str, Asking]) -> list[JudgingOutcome]:
        """Judge new answers in at most eight batches. Further answers wait for the next turn."""
        found: list[JudgingOutcome] = []
        while len(found) < _BATCHES_MAX and not (found and found[-1].is_last):
            now_s = self.clock()
            left_alone = self.deferrals.waiting(now_s)
            outcome = await self._batch(askings, left_alone)
            self._note(outcome, now_s)
            found.append(outcome)
        return found

    async def _batch(
        self, askings: Mapping[str, Asking], left_alone: Sequence[Group]
    ) -> JudgingOutcome:
        """Judge a batch.

        If the batch misses its deadline because of one group, this group counts as failed.
        """
        progress = Progress(time.monotonic, _EXAMINE_S)

        async def work(connection: AsyncConnection) -> JudgingOutcome:
            nonlocal progress
            progress = Progress(time.monotonic, _EXAMINE_S)
            return await judge_batch(connection, askings, left_alone, self.budget, progress)

        try:
            return await self.database.run(work, deadline_s=_DEADLINE_S)
        except DatabaseDownError as error:
            group = progress.slowest(_GROUP_S)
            if group is None:
                raise
            why = TooSlowError(f"its batch was not over within {_DEADLINE_S:g} s")
            why.__cause__ = error
            return JudgingOutcome(_NOTHING, {group: why}, (), is_last=False)

    def _note(self, outcome: JudgingOutcome, now_s: float) -> None:
        self.deferrals.succeeded(outcome.judged)
        self.deferrals.forget(now_s)
        for (pool, asking), error in outcome.failures.items():
            about = {"pool": pool, "asking": asking, "error": repr(error)}
            log.error("judging_failed", **about, exc_info=error)
            if self.deferrals.failed((pool, asking), now_s):
                advice = f"remove the prompt, or: sluice golden forget {pool}"
                log.error("judging_parked", **about, retry_s=PARKED_S, advice=advice)


async def judge_batch(
    connection: AsyncConnection,
    askings: Mapping[str, Asking],
    left_alone: Sequence[Group],
    budget: ReplacementBudget,
    progress: Progress,
) -> JudgingOutcome:
    """Judge a batch of answers, and store the consequences."""
    claimed = await repository.claim(connection, left_alone, ROWS_MAX)
    pools = {one.group[0] for one in claimed}
    taken = within(claimed, await repository.sizes(connection, pools) if pools else {}, ROWS_MAX)
    is_last = len(claimed) < ROWS_MAX and len(taken) == len({one.group for one in claimed})
    if not taken:
        return JudgingOutcome(_NOTHING, {}, (), is_last=True)
    fresh = frozenset(one.id for one in claimed)
    kept = await repository.answers(connection, taken, fresh)
    serving = await repository.serving(connection, pools)
    truths = await repository.truths(connection, taken)
    accused = await ejection_rows.accused(connection)
    try:
        cases, failures = await asyncio.to_thread(
            examine, askings, kept, serving, truths, progress.begins, accused
        )
    except asyncio.CancelledError:
        progress.stop()
        raise
    progress.ended()
    ruling = await _rule(connection, cases, kept, budget)
    right = right_answers(cases, kept, accused)
    out = [case.replica_id for case in ruling.quarantines]
    cleared = await ejection_rows.settle(connection, askings, right, out)
    failures |= await _learn(connection, ruling.learned)
    asked = {group for group in kept if group[1] in askings}
    left = asked - cases.keys() - failures.keys()
    is_last = is_last and not left
    judged = [group for group in taken if group not in failures and group not in left]
    done = frozenset(judged)
    await repository.set_judged(connection, [one.id for one in claimed if one.group in done])
    return JudgingOutcome(ruling, failures, judged, is_last, tuple(cleared))


def within(
    claimed: Sequence[Claimed], sizes: Mapping[str, int], rows_max: int
) -> tuple[Group, ...]:
    """Return the groups of a batch, at least one, in the order of the claimed answers.

    Args:
        claimed: Claimed answers.
        sizes: Largest number of answers in a group, by pool.
        rows_max: Largest number of answers in all groups together.
    """
    found: list[Group] = []
    rows = 0
    for group in dict.fromkeys(one.group for one in claimed):
        rows += sizes.get(group[0], 0)
        if found and rows > rows_max:
            break
        found.append(group)
    return tuple(found)


async def _rule(
    connection: AsyncConnection,
    cases: Mapping[Group, AskingCase],
    kept: Mapping[Group, Sequence[RecordedAnswer]],
    budget: ReplacementBudget,
) -> Ruling:
    """Decide on quarantines under a lock, so that other control planes' decisions are visible."""
    accused = {group[0] for group, case in cases.items() if case.accusations}
    if not accused:
        return await asyncio.to_thread(rule, cases, kept, (), {}, Spent({}, {}), budget, _new_id)
    await repository.lock_decisions(connection)
    serving = await repository.serving(connection, accused)
    spent = await repository.spent(connection)
    leaving, held = await repository.quarantined(connection), spent.holdback(budget).pools
    quarantined = {pool: max(leaving.get(pool, 0), held.get(pool, 0)) for pool in {*leaving, *held}}
    ruling = await asyncio.to_thread(
        rule, cases, kept, serving, quarantined, spent, budget, _new_id
    )
    await repository.quarantine(connection, ruling.quarantines)
    await suspicion_rows.add(connection, ruling.spared)
    return ruling


async def _learn(
    connection: AsyncConnection, learned: Mapping[Group, Truth]
) -> dict[Group, Exception]:
    """Store new right answers, and return the errors of groups whose answer was not stored."""
    failures: dict[Group, Exception] = {}
    for group, truth in sorted(learned.items(), key=lambda pair: pair[0]):
        try:
            async with connection.begin_nested():
                await repository.learn(connection, group, truth)
        except DBAPIError as error:  # the pool may have been deleted
            if is_transient(error):
                raise
            failures[group] = error
    return failures


def _new_id() -> str:
    return new_id("quarantine")


def log_quarantine(case: Quarantine) -> None:
    """Log a quarantine."""
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
