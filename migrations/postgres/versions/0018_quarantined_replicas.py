"""Replicas know that they are quarantined: their agents verify what they read."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    flag = sa.Column("is_quarantined", sa.Boolean(), server_default=sa.false(), nullable=False)
    op.add_column("replicas", flag)


def downgrade() -> None:
    op.drop_column("replicas", "is_quarantined")
