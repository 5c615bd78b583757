"""Responses that tenants may continue.

A partition per day (`responses_YYYYMMDD`), created for the first response of a day: expired
responses are dropped with their partition. A row without `response` marks a deleted one.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Date,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from control_plane.tables import list_column, metadata

responses = Table(
    "responses",
    metadata,
    Column("day", Date, nullable=False),
    Column("id", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("created_at_unix_ms", BigInteger, nullable=False),
    list_column("ancestors"),
    Column("input_items", LargeBinary),
    Column("response", LargeBinary),
    Column("prompt", LargeBinary),
    PrimaryKeyConstraint("day", "id"),
    Index("ix_responses_retention", "tenant_id", "created_at_unix_ms"),
    postgresql_partition_by="RANGE (day)",
)
