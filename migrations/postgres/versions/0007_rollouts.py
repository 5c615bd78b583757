"""Rollouts: how requests are split, pins of tenants, and the rollouts themselves."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _count(name: str) -> tuple[sa.Column, sa.CheckConstraint]:
    column = sa.Column(name, sa.Integer, server_default="0", nullable=False)
    return column, sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_splits_{name}"))


def upgrade() -> None:
    default = sa.text("'{}'::jsonb")
    op.add_column(
        "tenants", sa.Column("pins", postgresql.JSONB(), nullable=False, server_default=default)
    )
    op.create_table(
        "splits",
        sa.Column("id", sa.Text, sa.ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("control", sa.Text, nullable=False),
        sa.Column("canary", sa.Text, nullable=False),
        *_count("share"),
        *_count("mirrored"),
        sa.Column("salt", sa.Text, nullable=False),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER splits_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON splits DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('splits', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0007')")


def downgrade() -> None:
    op.drop_table("splits")
    op.drop_column("tenants", "pins")
