"""Rows of artifacts and their visibility, of uploads, and of chunks in the store."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)

from control_plane.artifacts.model import LIVE_STATES
from control_plane.tables import (
    flag_column,
    list_column,
    metadata,
    object_column,
    words_column,
)


def _moment(name: str) -> Column[datetime]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


# Accepted artifacts. A retired artifact is invisible and is removed soon, unless it is needed
# again.
artifacts = Table(
    "artifacts",
    metadata,
    Column("digest", Text, primary_key=True),
    Column(
        "kind", Text, CheckConstraint("kind IN ('adapter', 'base')", name="kind"), nullable=False
    ),
    list_column("base_digests"),  # digests of the bases for which the adapter was accepted
    Column("size_bytes", BigInteger, nullable=False),
    Column("file_count", Integer, nullable=False),
    object_column("manifest"),
    flag_column("is_pinned"),
    _moment("created_at"),
    Column("unreferenced_since", DateTime(timezone=True)),
    Column("retired_at", DateTime(timezone=True)),
)

# Tenants that may see an artifact. A row with NULL is for every tenant.
artifact_grants = Table(
    "artifact_grants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", Text, ForeignKey("artifacts.digest", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
    list_column("signed_by"),  # ids of the keys that signed the artifact
    _moment("created_at"),
    UniqueConstraint(
        "digest", "tenant_id", name="uq_artifact_grants_digest", postgresql_nulls_not_distinct=True
    ),
)

artifact_chunks = Table(
    "artifact_chunks",
    metadata,
    Column("digest", Text, ForeignKey("artifacts.digest", ondelete="CASCADE"), primary_key=True),
    Column("sha256", Text, primary_key=True, index=True),
)

# Chunks that are in the store, or may be. A doomed chunk is being deleted, so no upload may use it.
chunks = Table(
    "chunks",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("size_bytes", Integer, nullable=False),
    _moment("used_at"),  # time at which the chunk was last uploaded or referenced anew
    Column("doomed_at", DateTime(timezone=True)),
)

artifact_uploads = Table(
    "artifact_uploads",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
    words_column("digest"),  # digest of the artifact, empty until the import has computed it
    Column("kind", Text, nullable=False),
    words_column("base_digest"),
    words_column("source"),  # URI of an import, empty for an upload
    Column("state", Text, nullable=False),
    list_column("reasons"),
    Column("size_bytes", BigInteger, nullable=False, server_default="0"),
    object_column("manifest"),
    words_column("manifest_sha256"),  # SHA-256 of the canonical JSON of the manifest
    object_column("signatures"),  # signatures in base64, by id of the key
    _moment("created_at"),
    _moment("touched_at"),
    words_column("claim"),  # id of the claim of the process that works on the upload
    Column("claimed_until", DateTime(timezone=True)),
    # number of attempts in the present state, after which the upload is refused
    Column("attempts", Integer, nullable=False, server_default="0"),
)
# Only one upload per content is live, so that a repeated request continues the live upload. A
# digest does not determine sizes and chunks, so the index also includes the manifest.
Index(
    "uq_artifact_uploads_live_manifest",
    *(
        artifact_uploads.c[name]
        for name in ("tenant_id", "digest", "kind", "base_digest", "source", "manifest_sha256")
    ),
    unique=True,
    postgresql_where=text(f"state IN ({', '.join(repr(str(s)) for s in LIVE_STATES)})"),
    postgresql_nulls_not_distinct=True,
)

artifact_upload_chunks = Table(
    "artifact_upload_chunks",
    metadata,
    Column(
        "upload_id", Text, ForeignKey("artifact_uploads.id", ondelete="CASCADE"), primary_key=True
    ),
    Column("sha256", Text, primary_key=True, index=True),
    Column("size_bytes", Integer, nullable=False),
    flag_column("is_present"),
)

# Public keys that sign artifacts of a tenant, or of all tenants if the tenant is NULL.
signing_keys = Table(
    "signing_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner_tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
    Column("public_key", Text, nullable=False),
    flag_column("is_disabled"),
    _moment("created_at"),
)
