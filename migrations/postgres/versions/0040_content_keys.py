"""Keys that encrypt what tenants store, and for how long each tenant's content is kept."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    hours = sa.Column("retention_hours", sa.Integer, nullable=False, server_default="0")
    op.add_column("tenants", hours)
    op.create_check_constraint("retention_hours", "tenants", "retention_hours >= 0")
    none = sa.text("'[]'::jsonb")
    op.create_table(
        "content_keys",
        sa.Column(
            "id", sa.Text, sa.ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("keys", postgresql.JSONB, nullable=False, server_default=none),
        sa.Column("erased_at_unix_ms", sa.BigInteger, nullable=False, server_default="0"),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER content_keys_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON content_keys DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('content_keys', 'id')"
        )
    op.create_index("ix_responses_retention", "responses", ["tenant_id", "created_at_unix_ms"])
    op.create_index("ix_records_retention", "records", ["tenant_id", "touched_at_unix_ms"])
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0040')")


def downgrade() -> None:
    op.drop_index("ix_records_retention", "records")
    op.drop_index("ix_responses_retention", "responses")
    op.drop_table("content_keys")
    op.drop_column("tenants", "retention_hours")
