"""Pools in several cells, roles of replicas, what a tier is sure of, and who has left for good."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# Columns of replicas whose change readers must hear of; 0001 has those before `role`.
BEFORE = ("pool_id", "cell_id", "node_id", "is_draining", "state", "grpc_address", "triton_model", "profile")


def _flag(name: str) -> sa.Column:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false())


def _now(name: str) -> sa.Column:
    return sa.Column(
        name, sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")
    )


def _watch_replicas(columns: tuple[str, ...]) -> None:
    old, new = (f"({', '.join(f'{row}.{c}' for c in columns)})" for row in ("OLD", "NEW"))
    op.execute("DROP TRIGGER replicas_changed_by_update ON replicas")
    op.execute(
        "CREATE CONSTRAINT TRIGGER replicas_changed_by_update "
        "AFTER UPDATE ON replicas DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW WHEN ({old} IS DISTINCT FROM {new}) "
        "EXECUTE FUNCTION record_change('replicas', 'id')"
    )


def upgrade() -> None:
    op.add_column("tiers", sa.Column("reserved_permille", sa.Integer(), nullable=False, server_default="0"))
    op.create_check_constraint("reserved_permille", "tiers", "reserved_permille BETWEEN 0 AND 1000")
    op.add_column("tiers", _flag("is_preemptible"))
    op.add_column("pools", sa.Column("cell_replicas_max", sa.Integer(), nullable=False, server_default="64"))
    op.create_check_constraint("cell_replicas_max", "pools", "cell_replicas_max >= 0")
    op.add_column(
        "pools",
        sa.Column("roles", postgresql.JSONB(), nullable=False, server_default=sa.text("'{}'::jsonb")),
    )
    op.add_column("cells", _flag("is_draining"))
    op.add_column("cells", sa.Column("draining_since", sa.DateTime(timezone=True)))
    op.add_column("cells", _now("assigned_at"))
    op.add_column("routers", _now("came_at"))
    op.add_column("routers", _flag("is_gone"))
    op.add_column("replicas", sa.Column("role", sa.Text(), nullable=False, server_default=""))
    _watch_replicas((*BEFORE, "role"))


def downgrade() -> None:
    _watch_replicas(BEFORE)
    op.drop_column("replicas", "role")
    for name in ("is_gone", "came_at"):
        op.drop_column("routers", name)
    for name in ("assigned_at", "draining_since", "is_draining"):
        op.drop_column("cells", name)
    for name in ("roles", "cell_replicas_max"):
        op.drop_column("pools", name)
    for name in ("is_preemptible", "reserved_permille"):
        op.drop_column("tiers", name)
