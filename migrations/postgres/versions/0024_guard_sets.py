"""Rules on what tenants' requests say and are answered."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def _names(name: str) -> sa.Column:
    array = postgresql.ARRAY(sa.Text)
    return sa.Column(name, array, server_default=sa.text("'{}'"), nullable=False)


def _rules(name: str) -> sa.Column:
    return sa.Column(name, postgresql.JSONB, server_default=sa.text("'[]'"), nullable=False)


def upgrade() -> None:
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    op.create_table(
        "guard_sets",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("owner_tenant_id", sa.Text, tenant, nullable=False, index=True),
        _names("models"),
        _names("keys"),
        sa.Column("version", sa.Integer, server_default="0", nullable=False),
        _rules("rules"),
        sa.Column("active_version", sa.Integer, server_default="0", nullable=False),
        _rules("active_rules"),
        sa.CheckConstraint("version >= 0", name=op.f("ck_guard_sets_version")),
        sa.CheckConstraint("active_version >= 0", name=op.f("ck_guard_sets_active_version")),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER guard_sets_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON guard_sets DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('guard_sets', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0024')")


def downgrade() -> None:
    op.drop_table("guard_sets")
