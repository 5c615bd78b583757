"""Actuators: who brings the nodes of a pool, which nodes go, and how asking for them goes."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.Column("actuator", sa.Text, nullable=False, server_default="")
    per_node = sa.Column("replicas_per_node", sa.Integer, nullable=False, server_default="1")
    op.add_column("pool_scalings", name)
    op.add_column("pool_scalings", per_node)
    op.create_check_constraint("replicas_per_node", "pool_scalings", "replicas_per_node > 0")
    surplus = sa.Column("is_surplus", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("nodes", surplus)
    now = sa.func.now()
    op.create_table(
        "actuator_asks",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("nodes_wanted", sa.Integer, nullable=False, server_default="0"),
        sa.Column("nodes_present", sa.Integer, nullable=False, server_default="0"),
        sa.Column("result", sa.Text, nullable=False, server_default=""),
        sa.Column("warning", sa.Text, nullable=False, server_default=""),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        sa.Column("short_since", sa.DateTime(timezone=True)),
        sa.CheckConstraint("nodes_wanted >= 0", name="nodes_wanted"),
        sa.CheckConstraint("nodes_present >= 0", name="nodes_present"),
    )


def downgrade() -> None:
    op.drop_table("actuator_asks")
    op.drop_column("nodes", "is_surplus")
    op.drop_column("pool_scalings", "replicas_per_node")
    op.drop_column("pool_scalings", "actuator")
