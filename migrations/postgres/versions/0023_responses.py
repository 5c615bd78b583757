"""Responses that tenants may continue, by the day on which they were made."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("created_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column(
            "ancestors", postgresql.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("input_items", sa.LargeBinary),
        sa.Column("response", sa.LargeBinary),
        sa.PrimaryKeyConstraint("day", "id", name=op.f("pk_responses")),
        postgresql_partition_by="RANGE (day)",
    )


def downgrade() -> None:
    op.drop_table("responses")
