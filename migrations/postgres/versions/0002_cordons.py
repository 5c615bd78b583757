"""Nodes whose agents found an accelerator broken."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "nodes", sa.Column("is_cordoned", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column("nodes", sa.Column("cordon_reason", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "cordon_reason")
    op.drop_column("nodes", "is_cordoned")
