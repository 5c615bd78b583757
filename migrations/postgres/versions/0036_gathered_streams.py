"""How long parts of a stream may wait for others: by key, and by tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

_COLUMNS = (("api_keys", "interval_ms"), ("tenants", "gather_ms"))


def upgrade() -> None:
    for table, name in _COLUMNS:
        op.add_column(table, sa.Column(name, sa.Integer(), server_default="0", nullable=False))
        op.create_check_constraint(name, table, f"{name} >= 0")
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0036')")


def downgrade() -> None:
    for table, name in _COLUMNS:
        op.drop_column(table, name)
