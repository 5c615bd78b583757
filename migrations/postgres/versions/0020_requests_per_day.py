"""Requests per day of tiers and keys."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

TABLES = ("tiers", "api_keys")


def upgrade() -> None:
    for table in TABLES:
        column = sa.Column("rpd", sa.Integer(), server_default="0", nullable=False)
        op.add_column(table, column)
        op.create_check_constraint("rpd", table, "rpd >= 0")


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "rpd")
