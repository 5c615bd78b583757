"""Rollouts: how requests are split, pins of tenants, and the rollouts themselves."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _count(name: str, table: str = "splits") -> tuple[sa.Column, sa.CheckConstraint]:
    column = sa.Column(name, sa.Integer, server_default="0", nullable=False)
    return column, sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_{table}_{name}"))


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _object(name: str) -> sa.Column:
    default = sa.text("'{}'::jsonb")
    return sa.Column(name, postgresql.JSONB(), server_default=default, nullable=False)


def _moment(name: str) -> sa.Column:
    moment = sa.DateTime(timezone=True)
    return sa.Column(name, moment, server_default=sa.text("now()"), nullable=False)


def _model(name: str, **more: bool) -> sa.Column:
    key = sa.ForeignKey("models.id", ondelete="CASCADE")
    return sa.Column(name, sa.Text, key, nullable=False, **more)


def _rollouts() -> None:
    """All that is kept of rollouts."""
    tenant = sa.ForeignKey("tenants.id", ondelete="SET NULL")
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text, primary_key=True),
        _model("model_id", index=True),
        sa.Column("control", sa.Text, nullable=False),
        sa.Column("canary", sa.Text, nullable=False),
        sa.Column("owner_tenant_id", sa.Text, tenant, index=True),
        sa.Column("salt", sa.Text, nullable=False),
        _object("state"),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("is_live", sa.Boolean, server_default=sa.text("false"), nullable=False),
        sa.Column("version", sa.Integer, server_default="1", nullable=False),
        _moment("created_at"),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        _moment("split_at"),
        _words("taken_by"),
        sa.Column("taken_at", sa.DateTime(timezone=True)),
    )
    is_live = sa.text("is_live")
    op.create_index(
        "uq_rollouts_live", "rollouts", ["model_id"], unique=True, postgresql_where=is_live
    )
    key = sa.ForeignKey("rollouts.id", ondelete="CASCADE")
    op.create_table(
        "rollout_events",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("rollout_id", sa.Text, key, nullable=False),
        _moment("at"),
        sa.Column("event", sa.Text, nullable=False),
        _words("actor_id"),
        sa.Column("phase", sa.Text, nullable=False),
        _words("reason"),
        sa.Column("stage", sa.Integer, nullable=False),
        sa.Column("wanted", sa.Integer, nullable=False),
        *_count("share", "rollout_events"),
        *_count("mirrored", "rollout_events"),
        _words("detail"),
        sa.Column("verdict", postgresql.JSONB()),
    )
    op.create_index("ix_rollout_events_rollout_id", "rollout_events", ["rollout_id", "id"])
    op.create_table("rollout_plans", _model("id", primary_key=True), _object("plan"))
    op.create_table(
        "gateway_confirmations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("oldest_open_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
    )


def upgrade() -> None:
    default = sa.text("'{}'::jsonb")
    op.add_column(
        "tenants", sa.Column("pins", postgresql.JSONB(), nullable=False, server_default=default)
    )
    op.create_table(
        "splits",
        sa.Column("id", sa.Text, sa.ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("control", sa.Text, nullable=False),
        sa.Column("canary", sa.Text, nullable=False),
        *_count("share"),
        *_count("mirrored"),
        sa.Column("salt", sa.Text, nullable=False),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER splits_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON splits DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('splits', 'id')"
        )
    _rollouts()
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0007')")


def downgrade() -> None:
    for table in ("gateway_confirmations", "rollout_plans", "rollout_events", "rollouts"):
        op.drop_table(table)
    op.drop_table("splits")
    op.drop_column("tenants", "pins")
