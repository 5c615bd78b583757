"""Whether tokens that a tenant's rules withhold are billed."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    flag = sa.Column("is_withheld_free", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("guard_sets", flag)
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0029')")


def downgrade() -> None:
    op.drop_column("guard_sets", "is_withheld_free")
