"""What gateways lack: bases of new releases that they cannot serve yet."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    missing = postgresql.ARRAY(sa.Text)
    op.add_column(
        "gateway_confirmations",
        sa.Column("missing_bases", missing, nullable=False, server_default=sa.text("'{}'")),
    )


def downgrade() -> None:
    op.drop_column("gateway_confirmations", "missing_bases")
