"""Admin keys with roles, the audit log, remembered answers of idempotent requests."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _flag(name: str) -> sa.Column:
    return sa.Column(name, sa.Boolean, server_default=sa.text("false"), nullable=False)


def _moment(name: str) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "admin_keys",
        sa.Column("id", sa.Text, primary_key=True),
        _words("name"),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("expires_at_unix_ms", sa.BigInteger, server_default="0", nullable=False),
        _flag("is_disabled"),
        _moment("created_at"),
        sa.CheckConstraint("(role = 'publisher') = (tenant_id IS NOT NULL)", name="tenant_of_publisher"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Text, primary_key=True),
        _moment("at"),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("actor_id", "actor_role", "action", "kind", "object_id", "outcome")),
        _words("detail"),
        sa.Column("before", postgresql.JSONB()),
        sa.Column("after", postgresql.JSONB()),
        sa.Column("request_id", sa.Text, nullable=False),
        _words("idempotency_key"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_actor_id", "audit", ["actor_id", "id"])
    op.create_index("ix_audit_object_id", "audit", ["object_id", "id"])
    op.create_table(
        "idempotent_answers",
        sa.Column("actor_id", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("request_sha256", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        _words("body"),
        _flag("is_secret"),
        _words("object_id"),
        _moment("created_at"),
    )
    op.create_index("ix_idempotent_answers_created_at", "idempotent_answers", ["created_at"])


def downgrade() -> None:
    for table in ("idempotent_answers", "audit", "admin_keys"):
        op.drop_table(table)
