"""Suspicions: replicas that answer otherwise than they should, and have to stay."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now = sa.func.now()
    op.create_table(
        "suspicions",
        sa.Column("replica_id", sa.Text, primary_key=True),
        sa.Column("suspected_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
    )


def downgrade() -> None:
    op.drop_table("suspicions")
