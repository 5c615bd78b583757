"""Distribution: which artifacts lie complete on which node."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_artifacts",
        sa.Column("node_id", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, primary_key=True, index=True),
        sa.Column(
            "since", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
    )


def downgrade() -> None:
    op.drop_table("node_artifacts")
