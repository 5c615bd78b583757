"""Results of trials that nodes make of adapters, before they are rolled out."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    rollout = sa.ForeignKey("rollouts.id", ondelete="CASCADE")
    op.create_table(
        "rollout_trials",
        sa.Column("rollout_id", sa.Text, rollout, primary_key=True),
        sa.Column("node_id", sa.Text, primary_key=True),
        sa.Column("code", sa.Text, server_default="", nullable=False),
        sa.Column("message", sa.Text, server_default="", nullable=False),
        sa.Column(
            "tried_at",
            sa.DateTime(timezone=True),
            server_default=sa.func.now(),
            nullable=False,
        ),
    )


def downgrade() -> None:
    op.drop_table("rollout_trials")
