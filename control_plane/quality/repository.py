"""Rows of golden prompts, answers, truths and quarantines."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import RowMapping, Select, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.model import ReplicaState
from control_plane.models.model import release_id
from control_plane.quality.askings import Asking, Prompt
from control_plane.quality.consensus import RULES, Answer, Source, Text, Truth
from control_plane.quality.tables import (
    golden_answers,
    golden_prompts,
    golden_runs,
    golden_truths,
    quarantines,
)
from control_plane.quality.verdicts import Group, Kept, Quarantine, Serving

_LOCK = 7310520310  # held by the one control plane that judges now
_GROUPS_MAX = 256  # judged in one step
_RUNS_KEPT_S = 7 * 86_400
_QUARANTINES_KEPT = timedelta(days=90)


@dataclass(frozen=True, slots=True)
class Report:
    """An answer on its way into the database.

    Attributes:
        node_id: Who reported it.
        replica_id: Who gave it.
        asking: What was asked.
        text: None: there is none.
        error: Why.
        asked_at_unix_ms: By the clock of the node.
    """

    node_id: str
    replica_id: str
    asking: Asking
    text: Text | None
    error: str
    asked_at_unix_ms: int


async def try_lead(connection: AsyncConnection) -> bool:
    """Return whether this transaction may judge."""
    return bool(await connection.scalar(select(func.pg_try_advisory_xact_lock(_LOCK))))


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


async def add_reports(connection: AsyncConnection, reports: Sequence[Report]) -> None:
    """Keep answers of replicas that are there, on the nodes that report them; forget older ones."""
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
    await _forget_older(connection, sorted({report.replica_id for report in known}))
    await _count_runs(connection, known)


async def _forget_older(connection: AsyncConnection, replica_ids: Sequence[str]) -> None:
    a = golden_answers.c
    age = func.row_number().over(partition_by=(a.replica_id, a.asking_id), order_by=a.id.desc())
    ranked = select(a.id, age.label("age")).where(a.replica_id.in_(replica_ids)).subquery()
    old = select(ranked.c.id).where(ranked.c.age > RULES.askings)
    await connection.execute(delete(golden_answers).where(a.id.in_(old)))


async def _count_runs(connection: AsyncConnection, reports: Iterable[Report]) -> None:
    """Count what is expected of releases, by the second in which we heard of it.

    By our clock: then a second that is over gets no more, and no node's clock matters.
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


async def golden_counts(
    connection: AsyncConnection, model_id: str, releases: Sequence[str], start_ms: int, end_ms: int
) -> dict[str, tuple[int, int]]:
    """Return what releases of a model answered to prompts with an expected answer.

    Args:
        connection: Within the caller's transaction.
        model_id: Public name of the model.
        releases: Their names, without the model's.
        start_ms: Unix time, counted.
        end_ms: Unix time, not counted any more. Both are taken down to whole seconds.

    Returns:
        Name of each release that was asked -> (runs, mismatches).
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


async def new_groups(connection: AsyncConnection) -> list[Group]:
    """Return the pools and askings that have answers which were not judged."""
    a = golden_answers.c
    query = select(a.pool_id, a.asking_id).where(~a.is_judged).distinct().limit(_GROUPS_MAX)
    return [(pool, asking) for pool, asking in await connection.execute(query)]


async def serving(connection: AsyncConnection, pools: Iterable[str]) -> list[Serving]:
    """Return the replicas of pools that serve: ready ones that do not drain."""
    t = tables.replicas.c
    query = select(t.id, t.pool_id, t.node_id).where(
        t.pool_id.in_(sorted(set(pools))),
        ~t.is_draining,
        t.state == int(ReplicaState.READY),
    )
    return [Serving(*row) for row in await connection.execute(query)]


async def answers(connection: AsyncConnection, groups: Sequence[Group]) -> dict[Group, list[Kept]]:
    """Return the answers of groups, the newest first, and take them for judged."""
    a = golden_answers.c
    query = _answers().where(tuple_(a.pool_id, a.asking_id).in_(groups))
    rows = list((await connection.execute(query)).mappings())
    fresh = [row["id"] for row in rows if not row["is_judged"]]
    judged = update(golden_answers).where(a.id.in_(fresh)).values(is_judged=True)
    await connection.execute(judged)
    return _grouped(rows)


async def last_answers(
    connection: AsyncConnection, pool_id: str, limit: int
) -> tuple[dict[Group, list[Kept]], dict[Group, Truth], dict[int, str]]:
    """Return the newest answers, of one pool or (empty) of all, what is right, and errors by id."""
    query = _answers().limit(limit)
    if pool_id:
        query = query.where(golden_answers.c.pool_id == pool_id)
    rows = list((await connection.execute(query)).mappings())
    kept = _grouped(rows)
    return kept, await truths(connection, list(kept)), {row["id"]: row["error"] for row in rows}


def _answers() -> Select[Any]:
    return select(golden_answers).order_by(golden_answers.c.id.desc())


def _grouped(rows: Iterable[RowMapping]) -> dict[Group, list[Kept]]:
    found: dict[Group, list[Kept]] = {}
    for row in rows:
        text = None if row["error"] else Text(tuple(row["token_ids"]), tuple(row["logprobs"]))
        answer = Answer(row["id"], text, is_new=not row["is_judged"])
        kept = Kept(row["replica_id"], answer, row["asked_at_unix_ms"])
        found.setdefault((row["pool_id"], row["asking_id"]), []).append(kept)
    return found


async def truths(connection: AsyncConnection, groups: Sequence[Group]) -> dict[Group, Truth]:
    """Return what is known to be right."""
    if not groups:
        return {}
    t = golden_truths.c
    query = select(t.pool_id, t.asking_id, t.token_ids, t.logprobs, t.source)
    rows = await connection.execute(query.where(tuple_(t.pool_id, t.asking_id).in_(groups)))
    return {
        (pool, asking): Truth(Text(tuple(ids), tuple(logprobs)), Source(source))
        for pool, asking, ids, logprobs, source in rows
    }


async def learn(connection: AsyncConnection, learned: Mapping[Group, Truth]) -> None:
    """Keep what is right from now on."""
    for (pool, asking), truth in sorted(learned.items()):
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


async def quarantined(connection: AsyncConnection) -> dict[str, int]:
    """Return how many replicas of each pool are in quarantine and not gone yet."""
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
    """Take replicas out: they drain, and the fleet replaces them."""
    if cases:
        await connection.execute(insert(quarantines).values([asdict(case) for case in cases]))
        ids = sorted(case.replica_id for case in cases)
        t = tables.replicas
        await connection.execute(update(t).where(t.c.id.in_(ids)).values(is_draining=True))


async def take_back(connection: AsyncConnection, replica_id: str) -> bool:
    """Let a replica serve again, if it is still there; its answers so far do not count any more."""
    t = tables.replicas
    await connection.execute(
        delete(golden_answers).where(golden_answers.c.replica_id == replica_id)
    )
    query = update(t).where(t.c.id == replica_id).values(is_draining=False).returning(t.c.id)
    return (await connection.execute(query)).first() is not None


async def forget_answers(connection: AsyncConnection, pool_id: str) -> None:
    """Forget what a pool answered, and what is right there."""
    for table in (golden_truths, golden_answers):
        await connection.execute(delete(table).where(table.c.pool_id == pool_id))


async def prune(connection: AsyncConnection, askings: AbstractSet[str]) -> None:
    """Forget what is old, and what belongs to askings that are no more."""
    now_s = func.extract("epoch", func.now())
    await connection.execute(delete(golden_runs).where(golden_runs.c.second < now_s - _RUNS_KEPT_S))
    await connection.execute(
        delete(quarantines).where(quarantines.c.created_at < func.now() - _QUARANTINES_KEPT)
    )
    kept = sorted(askings)
    for table in (golden_truths, golden_answers):
        await connection.execute(delete(table).where(table.c.asking_id.not_in(kept)))
