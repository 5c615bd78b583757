"""Uploads count their attempts, and are told apart by their whole manifest."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_LIVE = sa.text("state IN ('importing', 'uploading', 'validating')")
_KEY = ["tenant_id", "digest", "kind", "base_digest", "source"]


def upgrade() -> None:
    op.add_column(
        "artifact_uploads",
        sa.Column("manifest_sha256", sa.Text, server_default="", nullable=False),
    )
    op.add_column(
        "artifact_uploads", sa.Column("attempts", sa.Integer, server_default="0", nullable=False)
    )
    _index("uq_artifact_uploads_live_manifest", [*_KEY, "manifest_sha256"])
    op.drop_index("uq_artifact_uploads_live", "artifact_uploads")


def downgrade() -> None:
    _index("uq_artifact_uploads_live", _KEY)
    op.drop_index("uq_artifact_uploads_live_manifest", "artifact_uploads")
    for name in ("attempts", "manifest_sha256"):
        op.drop_column("artifact_uploads", name)


def _index(name: str, columns: list[str]) -> None:
    op.create_index(
        name,
        "artifact_uploads",
        columns,
        unique=True,
        postgresql_where=_LIVE,
        postgresql_nulls_not_distinct=True,
    )
