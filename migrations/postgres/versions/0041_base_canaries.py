"""Base canaries: the prompt that routers ask the replicas of a base, by its own tokenizer."""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ids = sa.Column("canary_token_ids", sa.ARRAY(sa.Integer), nullable=False, server_default="{}")
    op.add_column("bases", ids)


def downgrade() -> None:
    op.drop_column("bases", "canary_token_ids")
