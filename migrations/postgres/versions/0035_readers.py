"""Admin keys of readers: a tenant's key need not be a publisher's any more.

The control plane checks it instead: a wider rule would be a new one to the last release.
"""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_constraint("tenant_of_publisher", "admin_keys", type_="check")


def downgrade() -> None:
    op.execute("DELETE FROM admin_keys WHERE role = 'reader'")
    op.create_check_constraint(
        "tenant_of_publisher",
        "admin_keys",
        "(role = 'publisher') = (tenant_id IS NOT NULL)",
    )
