"""Models know the release that they stood for before, which a rollback goes back to."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("previous_release", sa.Text(), server_default="", nullable=False)
    op.add_column("models", column)


def downgrade() -> None:
    op.drop_column("models", "previous_release")
