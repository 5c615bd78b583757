"""Pools of a model that several pools serve."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    model = sa.ForeignKey("models.id", ondelete="CASCADE")
    none = sa.text("'[]'::jsonb")
    op.create_table(
        "model_pools",
        sa.Column("id", sa.Text, model, primary_key=True),
        sa.Column("pools", postgresql.JSONB, server_default=none, nullable=False),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER model_pools_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON model_pools DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('model_pools', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0039')")


def downgrade() -> None:
    op.drop_table("model_pools")
