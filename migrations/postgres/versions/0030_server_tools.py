"""Tools that gateways call for models of tenants."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def _names(name: str) -> sa.Column:
    array = postgresql.ARRAY(sa.Text)
    return sa.Column(name, array, server_default=sa.text("'{}'"), nullable=False)


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _count(name: str) -> sa.Column:
    return sa.Column(name, sa.Integer, server_default="0", nullable=False)


def upgrade() -> None:
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    counts = ("timeout_ms", "result_bytes_max", "price_micros")
    op.create_table(
        "server_tools",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("owner_tenant_id", sa.Text, tenant, nullable=False, index=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        _words("description"),
        _words("parameters"),
        sa.Column("url", sa.Text, nullable=False),
        _words("method"),
        _count("timeout_ms"),
        _count("result_bytes_max"),
        sa.Column(
            "secret_headers", postgresql.JSONB, server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("is_idempotent", sa.Boolean, server_default=sa.text("false"), nullable=False),
        _words("approval"),
        _names("allowed_tools"),
        _names("models"),
        _names("keys"),
        _count("price_micros"),
        sa.CheckConstraint("kind IN ('http', 'mcp')", name=op.f("ck_server_tools_kind")),
        *[
            sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_server_tools_{name}"))
            for name in counts
        ],
        sa.UniqueConstraint(
            "owner_tenant_id", "name", name=op.f("uq_server_tools_owner_tenant_id")
        ),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER server_tools_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON server_tools DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('server_tools', 'id')"
        )
    flag = sa.Column(
        "allows_server_urls", sa.Boolean, server_default=sa.text("false"), nullable=False
    )
    op.add_column("tenants", flag)
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0030')")


def downgrade() -> None:
    op.drop_column("tenants", "allows_server_urls")
    op.drop_table("server_tools")
