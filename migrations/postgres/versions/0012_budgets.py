"""Budgets of tenants: what they may use in a period, how far they are, and who is stopped."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _sum(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger, server_default="0", nullable=False)


def _moment(name: str) -> sa.Column:
    moment = sa.DateTime(timezone=True)
    return sa.Column(name, moment, server_default=sa.text("now()"), nullable=False)


def _budgets() -> None:
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, tenant, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        _words("model_id"),
        sa.Column("unit", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("period", sa.Text, nullable=False),
        sa.Column("cached_percent", sa.Integer, server_default="100", nullable=False),
        sa.Column(
            "soft_percents",
            postgresql.ARRAY(sa.Integer),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("on_exhausted", sa.Text, nullable=False),
        _moment("created_at"),
        sa.CheckConstraint("amount >= 1", name=op.f("ck_budgets_amount")),
        sa.CheckConstraint(
            "cached_percent BETWEEN 0 AND 100", name=op.f("ck_budgets_cached_percent")
        ),
    )
    op.create_index("uq_budgets_name", "budgets", ["tenant_id", "name"], unique=True)


def upgrade() -> None:
    _budgets()
    budget = sa.ForeignKey("budgets.id", ondelete="CASCADE")
    op.create_table(
        "budget_states",
        sa.Column("budget_id", sa.Text, budget, primary_key=True),
        _sum("starts_at_unix_ms"),
        _sum("ends_at_unix_ms"),
        _sum("requests"),
        _sum("prompt_tokens"),
        _sum("cached_tokens"),
        _sum("output_tokens"),
        sa.Column("state", sa.Text, nullable=False),
        _moment("since"),
        _moment("looked_at"),
        _sum("ingested_until_unix_ms"),
    )
    op.create_index("ix_budget_states_state", "budget_states", ["state"])
    tenant = sa.ForeignKey("tenants.id", ondelete="CASCADE")
    nothing = sa.text("'[]'::jsonb")
    op.create_table(
        "budget_stops",
        sa.Column("id", sa.Text, tenant, primary_key=True),
        sa.Column("stops", postgresql.JSONB(), server_default=nothing, nullable=False),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        _moment("expires_at"),
    )
    for event, condition in (
        ("INSERT OR DELETE", ""),
        ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
    ):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER budget_stops_changed_by_{event.split()[-1].lower()} "
            f"AFTER {event} ON budget_stops DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('budget_stops', 'id')"
        )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0012')")


def downgrade() -> None:
    for table in ("budget_stops", "budget_states", "budgets", "leases"):
        op.drop_table(table)
