"""The models that `auto` may choose from."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

_NUMBERS = ("price_max", "quality_min", "second_price", "miss_price", "explored_share")
_COUNTS = ("queue_priority_min", "scheme")


def _list(name: str) -> sa.Column:
    return sa.Column(name, postgresql.JSONB, server_default=sa.text("'[]'"), nullable=False)


def upgrade() -> None:
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    op.create_table(
        "auto_policies",
        sa.Column("id", sa.Text, tenant, primary_key=True),
        _list("candidates"),
        *(sa.Column(name, sa.Double, server_default="0", nullable=False) for name in _NUMBERS),
        *(sa.Column(name, sa.Integer, server_default="0", nullable=False) for name in _COUNTS),
        sa.Column("pin", sa.Text, server_default="", nullable=False),
        _list("cells"),
        *(
            sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_auto_policies_{name}"))
            for name in (*_NUMBERS, *_COUNTS)
        ),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER auto_policies_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON auto_policies DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('auto_policies', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0031')")


def downgrade() -> None:
    op.drop_table("auto_policies")
