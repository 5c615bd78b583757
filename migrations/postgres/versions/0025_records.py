"""What tenants keep besides responses: records, and the items of each."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "records",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("created_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("touched_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("metadata", postgresql.JSONB, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_records")),
    )
    op.create_index(op.f("ix_records_tenant_id"), "records", ["tenant_id", "kind", "number"])
    op.create_index(op.f("ix_records_touched_at_unix_ms"), "records", ["touched_at_unix_ms"])
    op.create_table(
        "record_items",
        sa.Column("record_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("record_id", "id", name=op.f("pk_record_items")),
        sa.ForeignKeyConstraint(
            ["record_id"],
            ["records.id"],
            name=op.f("fk_record_items_record_id"),
            ondelete="CASCADE",
        ),
    )
    op.create_index(op.f("ix_record_items_record_id"), "record_items", ["record_id", "number"])


def downgrade() -> None:
    op.drop_table("record_items")
    op.drop_table("records")
