"""Artifacts: manifests, chunks, uploads, versions of models."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _flag(name: str) -> sa.Column:
    return sa.Column(name, sa.Boolean, server_default=sa.text("false"), nullable=False)


def _list(name: str) -> sa.Column:
    return sa.Column(name, sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False)


def _object(name: str) -> sa.Column:
    return sa.Column(
        name, postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False
    )


def _moment(name: str) -> sa.Column:
    return sa.Column(
        name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _maybe_moment(name: str) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True))


def _tenant(name: str = "tenant_id") -> sa.Column:
    return sa.Column(name, sa.Text, sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True)


def _digest(*, primary_key: bool) -> sa.Column:
    reference = sa.ForeignKey("artifacts.digest", ondelete="CASCADE")
    return sa.Column("digest", sa.Text, reference, primary_key=primary_key, nullable=False)


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        _list("base_digests"),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("file_count", sa.Integer, nullable=False),
        _object("manifest"),
        _flag("is_pinned"),
        _moment("created_at"),
        _maybe_moment("unreferenced_since"),
        _maybe_moment("retired_at"),
        sa.CheckConstraint("kind IN ('adapter', 'base')", name="kind"),
    )
    op.create_table(
        "artifact_grants",
        sa.Column("id", sa.Text, primary_key=True),
        _digest(primary_key=False),
        _tenant(),
        _list("signed_by"),
        _moment("created_at"),
        sa.UniqueConstraint(
            "digest",
            "tenant_id",
            name="uq_artifact_grants_digest",
            postgresql_nulls_not_distinct=True,
        ),
    )
    op.create_table(
        "artifact_chunks",
        _digest(primary_key=True),
        sa.Column("sha256", sa.Text, primary_key=True, index=True),
    )
    op.create_table(
        "chunks",
        sa.Column("sha256", sa.Text, primary_key=True),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        _moment("used_at"),
        _maybe_moment("doomed_at"),
    )
    op.create_table(
        "artifact_uploads",
        sa.Column("id", sa.Text, primary_key=True),
        _tenant(),
        _words("digest"),
        sa.Column("kind", sa.Text, nullable=False),
        _words("base_digest"),
        _words("source"),
        sa.Column("state", sa.Text, nullable=False),
        _list("reasons"),
        sa.Column("size_bytes", sa.BigInteger, server_default="0", nullable=False),
        _object("manifest"),
        _object("signatures"),
        _moment("created_at"),
        _moment("touched_at"),
        _words("claim"),
        _maybe_moment("claimed_until"),
    )
    op.create_index(
        "uq_artifact_uploads_live",
        "artifact_uploads",
        ["tenant_id", "digest", "kind", "base_digest", "source"],
        unique=True,
        postgresql_where=sa.text("state IN ('importing', 'uploading', 'validating')"),
        postgresql_nulls_not_distinct=True,
    )
    op.create_table(
        "artifact_upload_chunks",
        sa.Column(
            "upload_id",
            sa.Text,
            sa.ForeignKey("artifact_uploads.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("sha256", sa.Text, primary_key=True, index=True),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        _flag("is_present"),
    )
    op.create_table(
        "signing_keys",
        sa.Column("id", sa.Text, primary_key=True),
        _tenant("owner_tenant_id"),
        sa.Column("public_key", sa.Text, nullable=False),
        _flag("is_disabled"),
        _moment("created_at"),
    )


def downgrade() -> None:
    for table in (
        "signing_keys",
        "artifact_upload_chunks",
        "artifact_uploads",
        "chunks",
        "artifact_chunks",
        "artifact_grants",
        "artifacts",
    ):
        op.drop_table(table)
