"""A stored response has the sizes of its stream's deltas, so that the stream can be sent again."""

from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE responses ADD COLUMN deltas bytea")


def downgrade() -> None:
    op.execute("ALTER TABLE responses DROP COLUMN deltas")
