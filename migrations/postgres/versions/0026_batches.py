"""Batches of requests, and their lines."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("taken_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("metadata", postgresql.JSONB, nullable=False),
        sa.Column("reached_at_unix_ms", postgresql.JSONB, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.Text, nullable=False),
        sa.Column("error_file_id", sa.Text, nullable=False),
        sa.Column("errors", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_tenant_id"), "batches", ["tenant_id", "number"])
    op.create_index(op.f("ix_batches_status"), "batches", ["status", "taken_at_unix_ms"])
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("leased_by", sa.Text, nullable=False),
        sa.Column("leased_until_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("request_id", sa.Text),
        sa.Column("result", sa.LargeBinary),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name=op.f("fk_batch_lines_batch_id"),
            ondelete="CASCADE",
        ),
    )
    op.create_index(
        op.f("ix_batch_lines_batch_id"),
        "batch_lines",
        ["batch_id", "leased_until_unix_ms"],
        postgresql_where=sa.text("status IS NULL"),
    )


def downgrade() -> None:
    op.drop_table("batch_lines")
    op.drop_table("batches")
