"""Stored prompts: token ids and block hashes that a turn has brought, so that the next one appends."""

import sqlalchemy as sa
from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("responses", sa.Column("prompt", sa.LargeBinary))


def downgrade() -> None:
    op.drop_column("responses", "prompt")
