"""Batches of requests, and their lines. A line without `status` has not been answered yet."""

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.tables import metadata

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at_unix_ms", BigInteger, nullable=False),
    Column("expires_at_unix_ms", BigInteger, nullable=False),
    Column("taken_at_unix_ms", BigInteger, nullable=False),
    Column("metadata", JSONB, nullable=False),
    Column("reached_at_unix_ms", JSONB, nullable=False),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("output_file_id", Text, nullable=False),
    Column("error_file_id", Text, nullable=False),
    Column("errors", LargeBinary, nullable=False),
    Index("ix_batches_tenant_id", "tenant_id", "number"),
    Index("ix_batches_status", "status", "taken_at_unix_ms"),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", Text, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("custom_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("leased_by", Text, nullable=False),
    Column("leased_until_unix_ms", BigInteger, nullable=False),
    Column("status", Integer),
    Column("request_id", Text),
    Column("result", LargeBinary),
    PrimaryKeyConstraint("batch_id", "number"),
    Index(
        "ix_batch_lines_batch_id",
        "batch_id",
        "leased_until_unix_ms",
        postgresql_where=text("status IS NULL"),
    ),
)
