"""Replicas that routers ejected for their answers."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ejections",
        sa.Column("replica_id", sa.Text(), primary_key=True),
        sa.Column("router_id", sa.Text(), primary_key=True),
        sa.Column("ejected_at_unix_ms", sa.BigInteger(), primary_key=True),
        sa.Column("cell_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("wrong", sa.Integer(), server_default="0", nullable=False),
        sa.Column("asked", sa.Integer(), server_default="0", nullable=False),
        sa.Column("right_askings", sa.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("heard_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
    )
    is_open = sa.text("ended_at IS NULL")
    op.create_index("ix_ejections_open", "ejections", ["heard_at"], postgresql_where=is_open)


def downgrade() -> None:
    op.drop_table("ejections")
