"""Rows of the audit log, and of stored answers to requests with idempotency keys."""

from sqlalchemy import Column, DateTime, Index, Integer, LargeBinary, Table, Text, func
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.tables import flag_column, metadata, words_column

# One row per object and write, and one per refused write. Rows never change, and `id` sorts by
# time.
audit = Table(
    "audit",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now(), index=True),
    Column("actor_id", Text, nullable=False),
    Column("actor_role", Text, nullable=False),
    words_column("actor_name"),
    Column("action", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("object_id", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    words_column("detail"),
    Column("before", JSONB(none_as_null=True)),
    Column("after", JSONB(none_as_null=True)),
    Column("request_id", Text, nullable=False),
    words_column("idempotency_key"),
    # Each index ends with the id, because pages are sorted by id with any filter.
    Index("ix_audit_actor_id", "actor_id", "id"),
    Index("ix_audit_object_id", "object_id", "id"),
)

# Answers of writes with an idempotency key, stored in the transaction of the write.
answers = Table(
    "idempotent_answers",
    metadata,
    Column("actor_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_sha256", LargeBinary, nullable=False),
    Column("status", Integer, nullable=False),
    words_column("body"),  # JSON, or empty if the answer has no body or contains a secret
    flag_column("is_secret"),
    words_column("object_id"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
Index("ix_idempotent_answers_created_at", answers.c.created_at)
