"""Alerts, silences, what receivers were told, and incidents."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default="")


def _moment(name: str) -> sa.Column[object]:
    moment = sa.DateTime(timezone=True)
    return sa.Column(name, moment, nullable=False, server_default=sa.func.now())


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false())


def _object(name: str) -> sa.Column[object]:
    empty = sa.text("'{}'::jsonb")
    return sa.Column(name, postgresql.JSONB, nullable=False, server_default=empty)


def upgrade() -> None:
    _alerts()
    op.create_table(
        "alert_silences",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("matchers", postgresql.JSONB, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        _words("created_by"),
        _moment("starts_at"),
        _moment("ends_at"),
        sa.PrimaryKeyConstraint("id", name="pk_alert_silences"),
    )
    op.create_table(
        "alert_notifications",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("group_key", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("fingerprints", postgresql.ARRAY(sa.Text), nullable=False, server_default="{}"),
        _moment("told_at"),
        sa.Column("notice", postgresql.JSONB, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_at_unix_ms", sa.BigInteger, nullable=False, server_default="0"),
        _words("error"),
        sa.PrimaryKeyConstraint("id", name="pk_alert_notifications"),
    )
    _incidents()


def _alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("group_key", sa.Text, nullable=False),
        _object("labels"),
        _object("annotations"),
        _flag("is_firing"),
        _flag("is_silenced"),
        _moment("starts_at"),
        _moment("ends_at"),
        _words("acknowledged_by"),
        sa.Column("acknowledged_at", sa.DateTime(timezone=True)),
        _words("note"),
        _words("incident_id"),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
    )
    firing = sa.text("is_firing")
    op.create_index(
        "uq_alerts_firing", "alerts", ["fingerprint"], unique=True, postgresql_where=firing
    )
    op.create_index("ix_alerts_group_key", "alerts", ["group_key"])
    op.create_index("ix_alerts_ends_at", "alerts", ["ends_at"])


def _incidents() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        _flag("is_open"),
        _moment("opened_at"),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        _words("closed_by"),
        _words("text"),
        sa.PrimaryKeyConstraint("id", name="pk_incidents"),
    )
    is_open = sa.text("is_open")
    op.create_index("uq_incidents_open", "incidents", ["key"], unique=True, postgresql_where=is_open)
    op.create_index("ix_incidents_key", "incidents", ["key"])
    op.create_table(
        "incident_events",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("incident_id", sa.Text, nullable=False),
        _moment("at"),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        _words("actor"),
        sa.PrimaryKeyConstraint("id", name="pk_incident_events"),
        sa.ForeignKeyConstraint(
            ["incident_id"],
            ["incidents.id"],
            name="fk_incident_events_incident_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_incident_events_incident_id", "incident_events", ["incident_id"])


def downgrade() -> None:
    for table in (
        "incident_events",
        "incidents",
        "alert_notifications",
        "alert_silences",
        "alerts",
    ):
        op.drop_table(table)
