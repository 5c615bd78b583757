"""Records of tenants, such as conversations, and the items of each."""

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.tables import metadata

records = Table(
    "records",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("created_at_unix_ms", BigInteger, nullable=False),
    Column("touched_at_unix_ms", BigInteger, nullable=False),
    Column("model", Text, nullable=False),
    Column("metadata", JSONB, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Index("ix_records_tenant_id", "tenant_id", "kind", "number"),
    Index("ix_records_touched_at_unix_ms", "touched_at_unix_ms"),
    Index("ix_records_retention", "tenant_id", "touched_at_unix_ms"),
)

record_items = Table(
    "record_items",
    metadata,
    Column("record_id", Text, ForeignKey("records.id", ondelete="CASCADE"), nullable=False),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("id", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    PrimaryKeyConstraint("record_id", "id"),
    Index("ix_record_items_record_id", "record_id", "number"),
)
