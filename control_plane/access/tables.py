"""Rows of admin keys and of the console's sessions. Secrets are stored as hashes."""

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
)

# A session that began with an admin key ends with that key. A session of a person from an OpenID
# provider stores its own role, because the person has no key.
console_sessions = Table(
    "console_sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("secret_sha256", LargeBinary, nullable=False, unique=True),
    Column("key_sha256", LargeBinary),
    Column("actor_id", Text, nullable=False, index=True),
    Column("role", Text),
    Column("tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
    words_column("name"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
    CheckConstraint("(key_sha256 IS NULL) = (role IS NOT NULL)", name="key_or_role"),
)
