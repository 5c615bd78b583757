"""System prompts of models whose blocks stay in the caches of engines."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    array, none = postgresql.ARRAY(sa.Text), sa.text("'{}'")
    model = sa.ForeignKey("models.id", ondelete="CASCADE")
    op.create_table(
        "warm_prompts",
        sa.Column("id", sa.Text, model, primary_key=True),
        sa.Column("prompts", array, server_default=none, nullable=False),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER warm_prompts_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON warm_prompts DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('warm_prompts', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0032')")


def downgrade() -> None:
    op.drop_table("warm_prompts")
