"""Which tenants' prompts and answers are kept, redacted; without a row of theirs none are."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def _texts(name: str) -> sa.Column:
    array = postgresql.ARRAY(sa.Text)
    return sa.Column(name, array, server_default=sa.text("'{}'"), nullable=False)


def upgrade() -> None:
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    op.create_table(
        "text_policies",
        sa.Column("id", sa.Text, tenant, primary_key=True),
        sa.Column("is_on", sa.Boolean, server_default=sa.text("false"), nullable=False),
        sa.Column("share", sa.Integer, server_default="0", nullable=False),
        sa.Column("retention_days", sa.Integer, server_default="1", nullable=False),
        _texts("redacted"),
        _texts("words"),
        sa.CheckConstraint("share BETWEEN 0 AND 10000", name=op.f("ck_text_policies_share")),
        sa.CheckConstraint(
            "retention_days BETWEEN 1 AND 365", name=op.f("ck_text_policies_retention_days")
        ),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER text_policies_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON text_policies DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('text_policies', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0015')")


def downgrade() -> None:
    op.drop_table("text_policies")
