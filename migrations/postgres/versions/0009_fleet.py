"""Fleet: what operators want of nodes, what replicas need and have, and what rollouts demand."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def _flag(name: str) -> sa.Column:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false())


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text(), nullable=False, server_default="")


def _json(name: str, default: str) -> sa.Column:
    return sa.Column(
        name, postgresql.JSONB(), nullable=False, server_default=sa.text(f"'{default}'::jsonb")
    )


def _list(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, sa.ARRAY(kind), nullable=False, server_default=sa.text("'{}'"))


ADDED = {
    "nodes": (
        _flag("is_unschedulable"),
        _flag("is_draining"),
        _words("order_reason"),
        _words("drain_note"),
        _json("accelerator_facts", "[]"),
        _list("lifted_cordons", sa.Text()),
        _words("region"),
        _words("rack"),
    ),
    "pools": (
        _json("needs", "{}"),
        sa.Column("rollout_replicas", sa.Integer()),
        sa.Column("retire_at", sa.DateTime(timezone=True)),
    ),
    "replicas": (_list("accelerators", sa.Integer()), _json("reservation", "{}")),
}


def upgrade() -> None:
    for table, columns in ADDED.items():
        for column in columns:
            op.add_column(table, column)
    op.create_check_constraint("rollout_replicas", "pools", "rollout_replicas >= 0")
    op.create_table(
        "pool_demands",
        sa.Column(
            "pool_id", sa.Text(), sa.ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column(
            "model_id",
            sa.Text(),
            sa.ForeignKey("models.id", ondelete="CASCADE"),
            primary_key=True,
            index=True,
        ),
        sa.Column("replicas", sa.Integer(), nullable=False),
        sa.Column(
            "asked_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")
        ),
        sa.Column("ends_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint("replicas >= 0", name="replicas"),
    )
    op.create_table(
        "pool_conditions",
        sa.Column(
            "pool_id", sa.Text(), sa.ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("unplaced", sa.Integer(), nullable=False, server_default="0"),
        sa.Column(
            "since", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")
        ),
    )


def downgrade() -> None:
    op.drop_table("pool_conditions")
    op.drop_table("pool_demands")
    for table, columns in ADDED.items():
        for column in columns:
            op.drop_column(table, column.name)
