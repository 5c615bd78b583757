"""Scaling budget: the price of an accelerator, for pools without a price of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "scaling_budgets",
        sa.Column("accelerator_price", sa.Double, nullable=False, server_default="0"),
    )


def downgrade() -> None:
    op.drop_column("scaling_budgets", "accelerator_price")
