"""Responses that tenants may continue.

There is one partition per day (`responses_YYYYMMDD`), created for the first response of the day, so
that expired responses are deleted with their partition. A row without `response` marks a deleted
response.
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
    Column("deltas", LargeBinary),
    PrimaryKeyConstraint("day", "id"),
    Index("ix_responses_retention", "tenant_id", "created_at_unix_ms"),
    postgresql_partition_by="RANGE (day)",
)
