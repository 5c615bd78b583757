"""Reads and writes golden prompts, answers, right answers and quarantines."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    RowMapping,
    Select,
    Subquery,
    and_,
    any_,
    cast,
    delete,
    func,
    select,
    update,
)
from sqlalchemy import (
    Text as Words,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.model import Holdback, ReplicaState
from control_plane.models.model import release_id
from control_plane.quality import ejection_rows, suspicion_rows
from control_plane.quality.askings import DEFAULT, Asking, Prompt
from control_plane.quality.judgement import ASKINGS, Answer, RightAnswerSource, Truth
from control_plane.quality.tables import (
    golden_answers,
    golden_prompts,
    golden_runs,
    golden_truths,
    quarantines,
)
from control_plane.quality.verdicts import (
    Group,
    Quarantine,
    RecordedAnswer,
    ReplacementBudget,
    Serving,
    Spent,
)
from sluice.detector.consensus import Text

ROWS_MAX = 5000  # largest number of rows read by one query
_PAGES_MAX = 10  # largest number of pages per read
_DECISION_LOCK = 7310520310  # advisory lock for decisions about replicas
# First part of an advisory lock, whose second part is the hash of an owner. A transaction holds the
# lock while it adds a prompt of the owner.
_PROMPTS_LOCK = 731052032
_POOL_SPAN, _NODE_SPAN = timedelta(hours=1), timedelta(days=1)
_RUNS_KEPT_S = 7 * 86_400
_QUARANTINES_KEPT = timedelta(days=90)
_HASH = func.hashtextextended(golden_prompts.c.id, 0)
_NEWS_MARK = select(
    func.count(), func.coalesce(func.sum(_HASH), 0), ejection_rows.IS_ANY, suspicion_rows.IS_ANY
)


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """An answer of a replica that is to be stored.

    Attributes:
        node_id: Node that reported the answer.
        replica_id: Replica that answered.
        asking: Golden prompt that was answered.
        text: Text of the answer, or None if the replica did not answer.
        error: Reason why there is no answer.
        asked_at_unix_ms: Time at which the replica received the prompt, in Unix milliseconds of the
            node's clock.
    """

    node_id: str
    replica_id: str
    asking: Asking
    text: Text | None
    error: str
    asked_at_unix_ms: int


def _listed(values: Iterable[str]) -> ColumnElement[Any]:
    """Return an array as one parameter, because the number of parameters is limited."""
    return cast(list(values), ARRAY(Words))


def _of(groups: Sequence[Group]) -> Subquery:
    """Return a table of (pool, asking) pairs."""
    pools, ids = (_listed(group[index] for group in groups) for index in (0, 1))
    return select(
        func.unnest(pools).label("pool_id"), func.unnest(ids).label("asking_id")
    ).subquery()


async def news_mark(connection: AsyncConnection) -> tuple[tuple[int, int], bool, bool]:
    """Return a mark of the prompts, and whether any replica is accused and any is suspected.

    The mark changes when a prompt is added or removed, because prompts are immutable.
    """
    count, mark, is_accused, is_suspected = (await connection.execute(_NEWS_MARK)).one()
    return (int(count), int(mark)), is_accused, is_suspected


async def prompts_of_owner(connection: AsyncConnection, owner: str | None) -> int:
    """Return the number of prompts of an owner's models, and lock out concurrent additions."""
    number = func.hashtext(owner or "")
    await connection.execute(select(func.pg_advisory_xact_lock(_PROMPTS_LOCK, number)))
    query = (
        select(func.count())
        .select_from(golden_prompts)
        .join(tables.models, tables.models.c.id == golden_prompts.c.model_id)
        .where(tables.models.c.owner_tenant_id.is_not_distinct_from(owner))
    )
    return await connection.scalar(query) or 0


async def prompts(connection: AsyncConnection) -> tuple[Prompt, ...]:
    """Return all prompts."""
    t = golden_prompts.c
    rows = await connection.execute(
        select(
            *(t.id, t.model_id, t.token_ids, t.output_tokens_max, t.every_s, t.expected_token_ids)
        ).order_by(t.id)
    )
    return tuple(
        Prompt(one, model, tuple(ids), most, every_s, tuple(expected))
        for one, model, ids, most, every_s, expected in rows
    )


async def add_reports(connection: AsyncConnection, reports: Sequence[AnswerReport]) -> None:
    """Store answers of replicas that exist on the reporting node, and delete older answers."""
    t = tables.replicas.c
    ids = sorted({report.replica_id for report in reports})
    query = select(t.id, t.node_id, t.pool_id).where(t.id.in_(ids)).order_by(t.id)
    rows = await connection.execute(query.with_for_update(key_share=True, read=True))
    pool_of = {(one, node): pool for one, node, pool in rows}
    known = [r for r in reports if (r.replica_id, r.node_id) in pool_of]
    if not known:
        return
    await connection.execute(
        insert(golden_answers).values(
            [
                {
                    "replica_id": report.replica_id,
                    "pool_id": pool_of[report.replica_id, report.node_id],
                    "asking_id": report.asking.id,
                    "token_ids": list(report.text.token_ids) if report.text else [],
                    "logprobs": list(report.text.logprobs) if report.text else [],
                    "error": report.error,
                    "asked_at_unix_ms": report.asked_at_unix_ms,
                }
                for report in known
            ]
        )
    )
    await _forget_older(
        connection,
        sorted({(pool_of[r.replica_id, r.node_id], r.asking.id, r.replica_id) for r in known}),
    )
    await _count_runs(connection, known)


async def _forget_older(
    connection: AsyncConnection, written: Sequence[tuple[str, str, str]]
) -> None:
    """Delete older answers for each (pool, asking, replica) that has just answered."""
    a = golden_answers.c
    names = ("pool_id", "asking_id", "replica_id")
    told = select(
        *(
            func.unnest(_listed(one[index] for one in written)).label(name)
            for index, name in enumerate(names)
        )
    ).subquery()
    is_told = and_(*(a[name] == told.c[name] for name in names))
    age = func.row_number().over(partition_by=(a.replica_id, a.asking_id), order_by=a.id.desc())
    ranked = select(a.id, age.label("age")).join(told, is_told).subquery()
    old = select(ranked.c.id).where(ranked.c.age > ASKINGS)
    await connection.execute(delete(golden_answers).where(a.id.in_(old)))


async def _count_runs(connection: AsyncConnection, reports: Iterable[AnswerReport]) -> None:
    """Count the runs and mismatches of prompts with expected answers, by second of arrival.

    The seconds are those of the database's clock. So a past second receives no more answers, and
    differences between the nodes' clocks do not matter.
    """
    counts: dict[tuple[str, str, str], list[int]] = {}
    for report in reports:
        asking, text = report.asking, report.text
        if text is None or not asking.expected:
            continue
        one = counts.setdefault(
            (asking.model_id, asking.base_digest, asking.adapter_digest), [0, 0]
        )
        one[0] += 1
        one[1] += text.token_ids[: len(asking.expected)] != asking.expected
    if not counts:
        return
    second = await connection.scalar(
        select(func.floor(func.extract("epoch", func.clock_timestamp())))
    )
    names = ("model_id", "base_digest", "adapter_digest")
    query = insert(golden_runs).values(
        [
            dict(zip(names, key, strict=True))
            | {"second": int(second or 0), "runs": runs, "mismatches": mismatches}
            for key, (runs, mismatches) in sorted(counts.items())
        ]
    )
    added = {name: golden_runs.c[name] + query.excluded[name] for name in ("runs", "mismatches")}
    await connection.execute(
        query.on_conflict_do_update(index_elements=[*names, "second"], set_=added)
    )


async def has_expectations(connection: AsyncConnection, model_id: str) -> bool:
    """Return whether a model has golden prompts with an expected answer."""
    t = golden_prompts.c
    is_expected = func.cardinality(t.expected_token_ids) > 0
    query = select(t.id).where(t.model_id == model_id, is_expected).limit(1)
    return await connection.scalar(query) is not None


async def golden_counts(
    connection: AsyncConnection, model_id: str, releases: Sequence[str], start_ms: int, end_ms: int
) -> dict[str, tuple[int, int]]:
    """Return the runs of golden prompts by release, and the number of unexpected answers.

    Args:
        connection: Connection of the caller's transaction.
        model_id: Public name of the model.
        releases: Names of the releases, without the name of the model.
        start_ms: Start of the time range in Unix milliseconds, inclusive.
        end_ms: End of the time range, exclusive. Start and end are rounded down to whole seconds.

    Returns:
        (runs, mismatches) by name of each release that has runs.
    """
    r, g = tables.releases.c, golden_runs.c
    name_of = {release_id(model_id, name): name for name in releases}
    query = (
        select(r.id, func.sum(g.runs), func.sum(g.mismatches))
        .join(
            golden_runs,
            (g.model_id == r.model_id)
            & (g.base_digest == r.base_digest)
            & (g.adapter_digest == r.adapter_digest),
        )
        .where(r.id.in_(list(name_of)), g.second >= start_ms // 1000, g.second < end_ms // 1000)
        .group_by(r.id)
    )
    rows = await connection.execute(query)
    return {name_of[one]: (int(runs), int(missed)) for one, runs, missed in rows}


@dataclass(frozen=True, slots=True)
class Claimed:
    """A new answer that this transaction has claimed for judging."""

    id: int
    group: Group


async def claim(
    connection: AsyncConnection, left_alone: Sequence[Group], limit: int
) -> list[Claimed]:
    """Return answers to judge. Answers to the platform's prompts are first, then the oldest.

    The answers stay claimed until the transaction ends. Answers that another transaction has
    claimed are skipped.
    """
    a = golden_answers.c
    query = select(a.id, a.pool_id, a.asking_id).where(~a.is_judged)
    if left_alone:
        of = _of(left_alone)
        is_of = and_(a.pool_id == of.c.pool_id, a.asking_id == of.c.asking_id)
        query = query.where(~select(of).where(is_of).exists())
    query = query.order_by(a.asking_id.startswith(DEFAULT).desc(), a.id).limit(limit)
    rows = await connection.execute(query.with_for_update(skip_locked=True))
    return [Claimed(number, (pool, asking)) for number, pool, asking in rows]


async def sizes(connection: AsyncConnection, pools: Iterable[str]) -> dict[str, int]:
    """Return the largest possible number of answers to one golden prompt, by pool."""
    t = tables.replicas.c
    query = select(t.pool_id, func.count()).group_by(t.pool_id)
    rows = await connection.execute(query.where(t.pool_id == any_(_listed(sorted(set(pools))))))
    return {pool: int(count) * ASKINGS for pool, count in rows}


async def serving(connection: AsyncConnection, pools: Iterable[str]) -> list[Serving]:
    """Return the serving replicas of pools, which are ready and neither drain nor go to sleep."""
    t = tables.replicas.c
    query = select(t.id, t.pool_id, t.node_id).where(
        t.pool_id == any_(_listed(sorted(set(pools)))),
        ~t.is_draining,
        ~t.sleeps,
        t.state == int(ReplicaState.READY),
    )
    return [Serving(*row) for row in await connection.execute(query)]


async def answers(
    connection: AsyncConnection, groups: Sequence[Group], claimed: AbstractSet[int]
) -> dict[Group, list[RecordedAnswer]]:
    """Return the answers of groups, the newest first. Claimed answers are marked as new."""
    a, of = golden_answers.c, _of(groups)
    is_of = and_(a.pool_id == of.c.pool_id, a.asking_id == of.c.asking_id)
    query = select(golden_answers).join(of, is_of).order_by(a.id.desc()).limit(ROWS_MAX)
    rows: list[RowMapping] = []
    for _ in range(_PAGES_MAX):
        page = query.where(a.id < rows[-1]["id"]) if rows else query
        found = (await connection.execute(page)).mappings().all()
        rows += found
        if len(found) < ROWS_MAX:
            break
    found = await asyncio.to_thread(_grouped, rows, claimed)
    return {group: found[group] for group in groups if group in found}


async def set_judged(connection: AsyncConnection, ids: Sequence[int]) -> None:
    """Mark answers as judged."""
    judged = update(golden_answers).where(golden_answers.c.id == any_(cast(ids, ARRAY(BigInteger))))
    await connection.execute(judged.values(is_judged=True))


async def last_answers(
    connection: AsyncConnection, pool_id: str, limit: int
) -> tuple[dict[Group, list[RecordedAnswer]], dict[Group, Truth], dict[int, str]]:
    """Return the newest answers of all pools or of one pool, right answers, and errors.

    The errors are by answer id.
    """
    query = _answers().limit(limit)
    if pool_id:
        query = query.where(golden_answers.c.pool_id == pool_id)
    rows = list((await connection.execute(query)).mappings())
    kept = await asyncio.to_thread(_grouped, rows)
    return kept, await truths(connection, list(kept)), {row["id"]: row["error"] for row in rows}


def _answers() -> Select[Any]:
    return select(golden_answers).order_by(golden_answers.c.id.desc())


def _grouped(
    rows: Iterable[RowMapping], fresh: AbstractSet[int] = frozenset()
) -> dict[Group, list[RecordedAnswer]]:
    found: dict[Group, list[RecordedAnswer]] = {}
    for row in rows:
        text = None if row["error"] else Text(tuple(row["token_ids"]), tuple(row["logprobs"]))
        answer = Answer(row["id"], text, is_new=row["id"] in fresh)
        kept = RecordedAnswer(row["replica_id"], answer, row["asked_at_unix_ms"])
        found.setdefault((row["pool_id"], row["asking_id"]), []).append(kept)
    return found


async def truths(connection: AsyncConnection, groups: Sequence[Group]) -> dict[Group, Truth]:
    """Return the stored right answers of groups."""
    if not groups:
        return {}
    t = golden_truths.c
    of = _of(groups)
    is_of = and_(t.pool_id == of.c.pool_id, t.asking_id == of.c.asking_id)
    query = select(t.pool_id, t.asking_id, t.token_ids, t.logprobs, t.source).join(of, is_of)
    rows = await connection.execute(query)
    return {
        (pool, asking): Truth(Text(tuple(ids), tuple(logprobs)), RightAnswerSource(source))
        for pool, asking, ids, logprobs, source in rows
    }


async def learn(connection: AsyncConnection, group: Group, truth: Truth) -> None:
    """Store a new right answer of a group."""
    pool, asking = group
    values = {
        "token_ids": list(truth.text.token_ids),
        "logprobs": list(truth.text.logprobs),
        "source": truth.source,
        "since": func.now(),
    }
    query = insert(golden_truths).values(pool_id=pool, asking_id=asking, **values)
    await connection.execute(
        query.on_conflict_do_update(index_elements=["pool_id", "asking_id"], set_=values)
    )


async def lock_decisions(connection: AsyncConnection) -> None:
    """Acquire the lock on decisions about replicas, so that earlier decisions are visible."""
    await connection.execute(select(func.pg_advisory_xact_lock(_DECISION_LOCK)))


async def spent(connection: AsyncConnection) -> Spent:
    """Return the numbers of recent quarantines by pool and node."""
    q = quarantines.c
    is_of_hour, is_open = q.created_at > func.now() - _POOL_SPAN, q.released_at.is_(None)
    query = select(q.pool_id, q.node_id, is_of_hour, is_open)
    rows = await connection.execute(query.where(q.created_at > func.now() - _NODE_SPAN))
    found = rows.all()
    return Spent(
        Counter(pool for pool, _, is_of_hour, _ in found if is_of_hour),
        Counter(node for _, node, _, _ in found),
        Counter(pool for pool, _, is_of_hour, is_open in found if is_of_hour and is_open),
        Counter(node for _, node, _, is_open in found if is_open),
    )


async def holdback(connection: AsyncConnection, budget: ReplacementBudget) -> Holdback:
    """Return the limits on new replicas while too many replicas answer wrongly."""
    return (await spent(connection)).holdback(budget)


async def quarantined(connection: AsyncConnection) -> dict[str, int]:
    """Return the number of existing replicas in quarantine, by pool."""
    q = quarantines.c
    query = (
        select(q.pool_id, func.count(q.replica_id.distinct()))
        .join(tables.replicas, tables.replicas.c.id == q.replica_id)
        .where(q.released_at.is_(None), tables.replicas.c.is_draining)
        .group_by(q.pool_id)
    )
    rows = await connection.execute(query)
    return dict(rows.all())


async def quarantine(connection: AsyncConnection, cases: Sequence[Quarantine]) -> None:
    """Quarantine replicas, so that they drain and the fleet replaces them."""
    if cases:
        await connection.execute(insert(quarantines).values([asdict(case) for case in cases]))
        ids = sorted(case.replica_id for case in cases)
        t = tables.replicas
        out = {"is_draining": True, "is_quarantined": True}
        await connection.execute(update(t).where(t.c.id.in_(ids)).values(**out))


async def take_back(connection: AsyncConnection, replica_id: str) -> bool:
    """Return a replica to service if it still exists, and delete its earlier answers."""
    t = tables.replicas
    await connection.execute(
        delete(golden_answers).where(golden_answers.c.replica_id == replica_id)
    )
    serves = {"is_draining": False, "is_quarantined": False}
    query = update(t).where(t.c.id == replica_id).values(**serves).returning(t.c.id)
    return (await connection.execute(query)).first() is not None


async def set_canary(connection: AsyncConnection, base: str, token_ids: Sequence[int]) -> None:
    """Store the canary prompt of a base, if it has changed."""
    t, ids = tables.bases, list(token_ids)
    is_other = t.c.canary_token_ids != ids
    query = update(t).where(t.c.digest == base, is_other).values(canary_token_ids=ids)
    await connection.execute(query)


async def forget_answers(connection: AsyncConnection, pool_id: str) -> None:
    """Delete the answers and the right answers of a pool."""
    for table in (golden_truths, golden_answers):
        await connection.execute(delete(table).where(table.c.pool_id == pool_id))


async def prune(connection: AsyncConnection, askings: AbstractSet[str]) -> None:
    """Delete old rows, and rows of askings that no longer exist."""
    now_s = func.extract("epoch", func.now())
    await connection.execute(delete(golden_runs).where(golden_runs.c.second < now_s - _RUNS_KEPT_S))
    await connection.execute(
        delete(quarantines).where(quarantines.c.created_at < func.now() - _QUARANTINES_KEPT)
    )
    of = select(func.unnest(_listed(sorted(askings))).label("asking_id")).subquery()
    for table in (golden_truths, golden_answers):
        is_kept = select(of).where(of.c.asking_id == table.c.asking_id).exists()
        await connection.execute(delete(table).where(~is_kept))
