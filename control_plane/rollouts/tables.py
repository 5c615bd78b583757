"""Rows of rollouts, their events, plans of models, and confirmations of gateways."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.tables import (
    count_column,
    flag_column,
    list_column,
    metadata,
    object_column,
    words_column,
)


def _moment(name: str) -> Column[datetime]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _of_rollout() -> Column[str]:
    key = ForeignKey("rollouts.id", ondelete="CASCADE")
    return Column("rollout_id", Text, key, nullable=False)


# `state` is the complete rollout. Phase and times are copies, used for queries. A rollout is live
# until its state in gateways and the fleet has been removed, shortly after the rollout has ended.
rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "model_id", Text, ForeignKey("models.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("control", Text, nullable=False),  # name of a release, without the name of the model
    Column("canary", Text, nullable=False),
    Column("owner_tenant_id", Text, ForeignKey("tenants.id", ondelete="SET NULL"), index=True),
    Column("salt", Text, nullable=False),
    object_column("state"),
    Column("phase", Text, nullable=False),
    flag_column("is_live"),
    # incremented with every stored step
    Column("version", Integer, nullable=False, server_default="1"),
    _moment("created_at"),
    Column("started_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    _moment("split_at"),  # time of the last change of the split
    words_column("taken_by"),  # id of the process that steps the rollout
    Column("taken_at", DateTime(timezone=True)),
)
Index("uq_rollouts_live", rollouts.c.model_id, unique=True, postgresql_where=text("is_live"))

# Every step that changed the phase or the stage. `actor_id` is empty for automatic steps.
rollout_events = Table(
    "rollout_events",
    metadata,
    Column("id", Text, primary_key=True),
    _of_rollout(),
    _moment("at"),
    Column("event", Text, nullable=False),
    words_column("actor_id"),
    Column("phase", Text, nullable=False),
    words_column("reason"),
    Column("stage", Integer, nullable=False),
    Column("wanted", Integer, nullable=False),
    count_column("share"),
    count_column("mirrored"),
    words_column("detail"),
    Column("verdict", JSONB(none_as_null=True)),
    Index("ix_rollout_events_rollout_id", "rollout_id", "id"),
)

# Results of trial loads of canary's adapter. The code is empty if an engine loaded the adapter and
# generated a token.
rollout_trials = Table(
    "rollout_trials",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id", ondelete="CASCADE"), primary_key=True),
    Column("node_id", Text, primary_key=True),
    words_column("code"),
    words_column("message"),
    _moment("tried_at"),
)

# Plans for the rollouts of a model, for models that do not use the default plan.
rollout_plans = Table(
    "rollout_plans",
    metadata,
    Column("id", Text, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    object_column("plan"),
)

gateway_confirmations = Table(
    "gateway_confirmations",
    metadata,
    Column("id", Text, primary_key=True),  # id of the gateway's worker process
    Column("version", BigInteger, nullable=False),
    Column("oldest_open_unix_ms", BigInteger, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    list_column("missing_bases"),  # bases in rollouts that the gateway cannot serve yet
)
