"""Sessions of the console; the audit log has names of keys and people."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
        sa.Column("key_sha256", sa.LargeBinary),
        sa.Column("actor_id", sa.Text, nullable=False),
        sa.Column("role", sa.Text),
        sa.Column("tenant_id", sa.Text),
        sa.Column("name", sa.Text, server_default="", nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "(key_sha256 IS NULL) = (role IS NOT NULL)",
            name=op.f("ck_console_sessions_key_or_role"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_console_sessions_tenant_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_console_sessions")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_console_sessions_secret_sha256")),
    )
    for name in ("actor_id", "tenant_id", "expires_at"):
        op.create_index(op.f(f"ix_console_sessions_{name}"), "console_sessions", [name])
    op.add_column("audit", sa.Column("actor_name", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("audit", "actor_name")
    op.drop_table("console_sessions")
