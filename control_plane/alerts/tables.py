"""Rows of alerts, silences, incidents, and of notices to receivers."""

from sqlalchemy import BigInteger, Column, DateTime, ForeignKey, Index, Integer, Table, Text, func
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.tables import flag_column, list_column, metadata, object_column, words_column


def _moment(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


# One row per period in which an alert fired. Ids are in the order in which alerts began to fire.
alerts = Table(
    "alerts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("group_key", Text, nullable=False),
    object_column("labels"),
    object_column("annotations"),
    flag_column("is_firing"),
    flag_column("is_silenced"),
    _moment("starts_at"),
    # time at which the alert ends unless it is reported again, or at which it ended
    _moment("ends_at"),
    words_column("acknowledged_by"),
    Column("acknowledged_at", DateTime(timezone=True)),
    words_column("note"),
    words_column("incident_id"),
)
Index("uq_alerts_firing", alerts.c.fingerprint, unique=True, postgresql_where=sql("is_firing"))
Index("ix_alerts_group_key", alerts.c.group_key)
Index("ix_alerts_ends_at", alerts.c.ends_at)

silences = Table(
    "alert_silences",
    metadata,
    Column("id", Text, primary_key=True),
    Column("matchers", JSONB, nullable=False),
    Column("reason", Text, nullable=False),
    words_column("created_by"),
    _moment("starts_at"),
    _moment("ends_at"),
)

# The last notice about each group to each receiver, and the result of sending it.
notifications = Table(
    "alert_notifications",
    metadata,
    Column("id", Text, primary_key=True),  # `RECEIVER/GROUP`
    Column("receiver", Text, nullable=False),
    Column("group_key", Text, nullable=False),
    Column("status", Text, nullable=False),
    list_column("fingerprints"),
    _moment("told_at"),
    Column("notice", JSONB, nullable=False),
    Column("state", Text, nullable=False),  # `pending`, `sent` or `failed`
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_at_unix_ms", BigInteger, nullable=False, server_default="0"),
    words_column("error"),
)

incidents = Table(
    "incidents",
    metadata,
    Column("id", Text, primary_key=True),
    Column("key", Text, nullable=False),  # key of a group of alerts, or `rollout/ID`
    Column("title", Text, nullable=False),
    flag_column("is_open"),
    _moment("opened_at"),
    Column("closed_at", DateTime(timezone=True)),
    words_column("closed_by"),
    words_column("text"),
)
Index("uq_incidents_open", incidents.c.key, unique=True, postgresql_where=sql("is_open"))
Index("ix_incidents_key", incidents.c.key)

incident_events = Table(
    "incident_events",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "incident_id",
        Text,
        ForeignKey("incidents.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    _moment("at"),
    Column("kind", Text, nullable=False),
    Column("text", Text, nullable=False),
    words_column("actor"),
)
