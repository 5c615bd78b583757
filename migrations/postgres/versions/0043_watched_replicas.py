"""Readers hear of every change that they get of a replica: its sleep, its quarantine, its devices."""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

BEFORE = (
    *("pool_id", "cell_id", "node_id", "is_draining", "state", "grpc_address"),
    *("triton_model", "profile", "role"),
)


def _watch(columns: tuple[str, ...]) -> None:
    old, new = (f"({', '.join(f'{row}.{c}' for c in columns)})" for row in ("OLD", "NEW"))
    op.execute("DROP TRIGGER replicas_changed_by_update ON replicas")
    op.execute(
        "CREATE CONSTRAINT TRIGGER replicas_changed_by_update "
        "AFTER UPDATE ON replicas DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW WHEN ({old} IS DISTINCT FROM {new}) "
        "EXECUTE FUNCTION record_change('replicas', 'id')"
    )


def upgrade() -> None:
    _watch((*BEFORE, "accelerators", "is_quarantined", "sleeps"))


def downgrade() -> None:
    _watch(BEFORE)
