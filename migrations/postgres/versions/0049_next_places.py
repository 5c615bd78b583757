"""Nodes on which the next replicas of pools would be placed."""

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "next_places",
        *(
            sa.Column(name, sa.Text, sa.ForeignKey(of, ondelete="CASCADE"), primary_key=True)
            for name, of in (("pool_id", "pools.id"), ("node_id", "nodes.id"))
        ),
    )


def downgrade() -> None:
    op.drop_table("next_places")
