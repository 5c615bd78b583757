"""The numbers of each scaled pool once a minute, for charts of a day."""

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None

COUNTS = ("wanted", "ready", "booting", "asleep")


def upgrade() -> None:
    pool = sa.ForeignKey("pools.id", ondelete="CASCADE")
    op.create_table(
        "scaling_minutes",
        sa.Column("pool_id", sa.Text(), pool, primary_key=True),
        sa.Column("minute", sa.DateTime(timezone=True), primary_key=True, index=True),
        *(sa.Column(name, sa.Integer(), server_default="0", nullable=False) for name in COUNTS),
        sa.Column("demand", sa.Double(), nullable=False),
        *(sa.CheckConstraint(f"{name} >= 0", name=name) for name in COUNTS),
    )


def downgrade() -> None:
    op.drop_table("scaling_minutes")
