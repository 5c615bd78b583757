"""Sleepers: replicas that shall sleep, and how many of a pool."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

_NUMBERS = (("pools", "scaled_sleepers"), ("pool_scalings", "sleepers_min"))


def upgrade() -> None:
    sleeps = sa.Column("sleeps", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("replicas", sleeps)
    for table, name in _NUMBERS:
        column = sa.Column(name, sa.Integer, nullable=False, server_default="0")
        op.add_column(table, column)
        op.create_check_constraint(name, table, f"{name} >= 0")
    share = sa.Column("sleepers_share", sa.Double, nullable=False, server_default="0")
    op.add_column("pool_scalings", share)


def downgrade() -> None:
    op.drop_column("pool_scalings", "sleepers_share")
    for table, name in reversed(_NUMBERS):
        op.drop_column(table, name)
    op.drop_column("replicas", "sleeps")
