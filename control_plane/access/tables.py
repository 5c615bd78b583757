"""Rows of admin keys; only the hash of a key's text is kept."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    LargeBinary,
    Table,
    Text,
    func,
)

from control_plane.tables import flag_column, metadata, words_column

admin_keys = Table(
    "admin_keys",
    metadata,
    Column("id", Text, primary_key=True),
    words_column("name"),
    Column("role", Text, nullable=False),
    Column("tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
    Column("secret_sha256", LargeBinary, nullable=False, unique=True),
    Column("expires_at_unix_ms", BigInteger, nullable=False, server_default="0"),
    flag_column("is_disabled"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("(role = 'publisher') = (tenant_id IS NOT NULL)", name="tenant_of_publisher"),
)
