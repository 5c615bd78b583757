"""Scaling of roles: the numbers of replicas that only prefill, their bounds, and their changes."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pools", sa.Column("scaled_prefill", sa.Integer))
    roles = sa.Column("roles", JSONB, nullable=False, server_default=sa.text("'{}'::jsonb"))
    op.add_column("pool_scalings", roles)
    op.add_column("pool_scalings", sa.Column("pin_prefill", sa.Integer))
    op.add_column("scaling_changes", sa.Column("role", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("scaling_changes", "role")
    op.drop_column("pool_scalings", "pin_prefill")
    op.drop_column("pool_scalings", "roles")
    op.drop_column("pools", "scaled_prefill")
