"""Reads rollouts for lists. PostgreSQL extracts a few values from each stored state.

A state may have any size, so a list does not transfer whole states. If another version of the
control plane wrote a state that this version cannot read, the rollout is still listed. Its entry
has all fields that are not part of the state, and a `problem`.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, Select, and_, any_, case, func, literal, select
from sqlalchemy.dialects.postgresql import JSONB, aggregate_order_by

from control_plane.models.model import RELEASE_MARK
from control_plane.rollouts.facts import GATEWAY_LIVE_S
from control_plane.rollouts.shown import SUMMARY, Standing, progress, unknown_progress
from control_plane.rollouts.tables import gateway_confirmations, rollout_trials, rollouts
from control_plane.tables import releases, splits

Values = dict[str, Any]

_STANDING: TypeAdapter[Standing] = TypeAdapter(Standing)
_PICKED = ("phase", "reason", "stage", "wanted", "share", "mirrored", "verdict")
_TIMES = ("created_at", "started_at", "ended_at")


def listed() -> Select[Any]:
    """Return the query of list rows for all rollouts. `with_state` adds the remaining columns."""
    t, split = rollouts.c, splits.c
    own_split = and_(split.id == t.model_id, split.rollout_id == t.id)
    return select(
        *(column for column in t if column is not t.state),
        _standing().label("standing"),
        func.coalesce(split.share, 0).label("split_share"),
        func.coalesce(split.mirrored, 0).label("split_mirrored"),
    ).select_from(rollouts.outerjoin(splits, own_split))


def with_state(query: Select[Any]) -> Select[Any]:
    """Add columns to a query: the complete state, and the gateways without canary's base."""
    return query.add_columns(rollouts.c.state, *_lacking(), _trials().label("trials"))


def summary(row: Values, unread: Mapping[str, str]) -> Values:
    """Return the list entry of a rollout's row.

    Args:
        row: Row of the query `listed`.
        unread: Reasons why this control plane cannot step a rollout, by the rollout's id.
    """
    times = {name: row[name].isoformat() if row[name] else "" for name in _TIMES}
    owner = row["owner_tenant_id"] or ""
    found = row | times | {"owner_tenant_id": owner} | _progress(row, unread.get(row["id"], ""))
    return {name: found[name] for name in SUMMARY}


def _progress(row: Values, problem: str) -> Values:
    try:
        found = progress(_STANDING.validate_json(json.dumps(row["standing"])))
    except ValidationError as error:
        shares = row["split_share"], row["split_mirrored"]
        return unknown_progress(row["phase"], *shares, problem or why(error))
    return found | {"problem": problem}


def _lacking() -> tuple[ColumnElement[Any], ...]:
    """Return the columns for canary's base, and for the gateways that cannot serve the base yet."""
    t, gateway = rollouts.c, gateway_confirmations.c
    canary = select(releases.c.base_digest).where(
        releases.c.id == t.model_id + RELEASE_MARK + t.canary
    )
    base = canary.correlate(rollouts).scalar_subquery()
    is_there = gateway.seen_at > func.now() - timedelta(seconds=GATEWAY_LIVE_S)
    lacking = select(gateway.id).where(is_there, base == any_(gateway.missing_bases))
    lacking = lacking.order_by(gateway.id).correlate(rollouts)
    return (
        base.label("canary_base"),
        func.array(lacking.scalar_subquery()).label("lacking"),
    )


def _trials() -> ColumnElement[Any]:
    """Return the results of the trial loads of canary's adapter, as a JSON list."""
    t = rollout_trials.c
    pairs = [part for name in ("node_id", "code", "message") for part in (name, t[name])]
    one = aggregate_order_by(func.jsonb_build_object(*pairs), t.node_id)
    found = select(func.jsonb_agg(one)).where(t.rollout_id == rollouts.c.id).correlate(rollouts)
    return func.coalesce(found.scalar_subquery(), literal([], JSONB))


def why(error: ValidationError) -> str:
    """Return the message for operators about a state that cannot be read."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "state"
    return (
        f"its state cannot be read ({place}: {first['msg']}): another version of the control plane"
        " wrote it, or it is damaged; it stays as it is until one steps it that can, or it is"
        " aborted"
    )


def _standing() -> ColumnElement[Any]:
    """Return the column with a JSON document of the listed values. A missing value is null."""
    state = rollouts.c.state
    stages = state["plan"]["stages"]
    is_list = func.jsonb_typeof(stages) == "array"
    pairs: list[object] = ["stages", case((is_list, func.jsonb_array_length(stages)))]
    for name in _PICKED:
        pairs += [name, state[name]]
    return func.jsonb_build_object(*pairs)
