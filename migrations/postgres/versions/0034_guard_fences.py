"""How long answers wait for the classifiers of a tenant's rules, and what failures of these do."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "guard_sets", sa.Column("fence", sa.Text, nullable=False, server_default="sentence")
    )
    tokens = sa.Column("fence_tokens", sa.Integer, nullable=False, server_default="32")
    op.add_column("guard_sets", tokens)
    closed = sa.Column("is_closed_on_failure", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("guard_sets", closed)
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0034')")


def downgrade() -> None:
    for name in ("is_closed_on_failure", "fence_tokens", "fence"):
        op.drop_column("guard_sets", name)
