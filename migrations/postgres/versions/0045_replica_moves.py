"""Moves of replicas that empty a node, and the nodes that they have emptied."""

import sqlalchemy as sa
from alembic import op

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "nodes", sa.Column("is_vacated", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.create_table(
        "replica_moves",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column(
            "pool_id", sa.Text, sa.ForeignKey("pools.id", ondelete="CASCADE"), nullable=False
        ),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("replica_id", "node_id")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("moves_to", "why")),
        sa.Column(
            "began_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), index=True),
        sa.Column("result", sa.Text, nullable=False, server_default=""),
    )
    op.create_index(
        "ix_replica_moves_open",
        "replica_moves",
        [sa.text("(ended_at IS NULL)")],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def downgrade() -> None:
    op.drop_table("replica_moves")
    op.drop_column("nodes", "is_vacated")
