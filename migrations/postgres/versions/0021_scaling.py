"""Scaling: bounds of pools, reports of routers, measured speeds, and what was decided."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

TABLES = (
    *("scaling_budgets", "scaling_changes", "engine_speeds", "cell_demands"),
    *("pool_scaling_states", "pool_scalings"),
)


def _moment(name: str) -> "sa.Column[object]":
    return sa.Column(
        name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _object(name: str) -> "sa.Column[object]":
    return sa.Column(name, JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False)


def _flag(name: str) -> "sa.Column[object]":
    return sa.Column(name, sa.Boolean(), server_default=sa.text("false"), nullable=False)


def _number(name: str, default: str) -> "sa.Column[object]":
    return sa.Column(name, sa.Double(), server_default=default, nullable=False)


def _pool(**options: bool) -> "sa.Column[object]":
    reference = sa.ForeignKey("pools.id", ondelete="CASCADE")
    return sa.Column("pool_id", sa.Text(), reference, nullable=False, **options)


def _settings() -> None:
    op.create_table(
        "pool_scalings",
        _pool(primary_key=True),
        _flag("is_on"),
        sa.Column("replicas_min", sa.Integer(), server_default="0", nullable=False),
        sa.Column("replicas_max", sa.Integer(), server_default="0", nullable=False),
        _number("minute_worth", "3"),
        _number("idle_s", "900"),
        _number("hold_s", "300"),
        _number("price", "0"),
        _flag("is_paused"),
        sa.Column("pin", sa.Integer()),
        sa.Column("pin_until", sa.DateTime(timezone=True)),
        sa.Column("pinned_by", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint("replicas_min >= 0", name="replicas_min"),
        sa.CheckConstraint("replicas_max >= 0", name="replicas_max"),
        sa.CheckConstraint("pin >= 0", name="pin"),
    )
    op.create_table(
        "scaling_budgets",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("accelerators", sa.Integer()),
        sa.Column("price", sa.Double()),
    )


def _reports() -> None:
    op.create_table(
        "cell_demands",
        sa.Column(
            "cell_id", sa.Text(), sa.ForeignKey("cells.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("router_id", sa.Text(), primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        _object("report"),
        _moment("received_at"),
    )
    op.create_table(
        "engine_speeds",
        sa.Column("base_digest", sa.Text(), primary_key=True),
        sa.Column("hardware", sa.Text(), primary_key=True),
        sa.Column("configuration", sa.Text(), primary_key=True),
        sa.Column("prompt_token_s", sa.Double(), nullable=False),
        sa.Column("output_token_s", sa.Double(), nullable=False),
        sa.Column("sequences", sa.Integer(), nullable=False),
        _moment("measured_at"),
    )


def _decisions() -> None:
    op.create_table(
        "pool_scaling_states",
        _pool(primary_key=True),
        _object("memory"),
        _object("decision"),
        _moment("decided_at"),
    )
    op.create_table(
        "scaling_changes",
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        _pool(),
        _moment("changed_at"),
        sa.Column("before", sa.Integer(), nullable=False),
        sa.Column("after", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_index("ix_scaling_changes_pool_id", "scaling_changes", ["pool_id", "id"])


def upgrade() -> None:
    op.add_column("pools", sa.Column("scaled_replicas", sa.Integer()))
    op.create_check_constraint("scaled_replicas", "pools", "scaled_replicas >= 0")
    _settings()
    _reports()
    _decisions()


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)
    op.drop_column("pools", "scaled_replicas")
