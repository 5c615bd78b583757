"""Scopes and lists of keys, finer limits, fallbacks; releases and aliases of models."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

WATCHED = ("releases", "aliases")
# A model whose release nobody has named is named by its digests, as the control plane does it.
NAME_RELEASES = """
UPDATE models SET release = CASE adapter_digest
    WHEN '' THEN left(base_digest, 12)
    ELSE left(adapter_digest, 8) || '-' || left(base_digest, 8)
END
WHERE release = ''
"""
RECORD_RELEASES = """
INSERT INTO releases (id, model_id, base_digest, adapter_digest, pool_id)
SELECT id || '@' || release, id, base_digest, adapter_digest, pool_id FROM models
"""


def _count(table: str, name: str) -> None:
    op.add_column(table, sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.create_check_constraint(name, table, f"{name} >= 0")


def _object(table: str, name: str) -> None:
    default = sa.text("'{}'::jsonb")
    op.add_column(table, sa.Column(name, postgresql.JSONB(), nullable=False, server_default=default))


def _list(table: str, name: str) -> None:
    op.add_column(
        table, sa.Column(name, sa.ARRAY(sa.Text), nullable=False, server_default=sa.text("'{}'"))
    )


def _reference(name: str, target: str, *, nullable: bool = True, ondelete: str | None = None) -> sa.Column:
    return sa.Column(name, sa.Text, sa.ForeignKey(target, ondelete=ondelete), nullable=nullable, index=True)


def upgrade() -> None:
    _count("tiers", "requests_max")
    _object("tiers", "model_limits")
    _object("tenants", "limits")
    _object("tenants", "fallbacks")
    _count("api_keys", "requests_max")
    _list("api_keys", "scopes")
    _list("api_keys", "models")
    op.create_table(
        "releases",
        sa.Column("id", sa.Text, primary_key=True),
        _reference("model_id", "models.id", nullable=False, ondelete="CASCADE"),
        _reference("base_digest", "bases.digest", nullable=False),
        sa.Column("adapter_digest", sa.Text, server_default="", nullable=False),
        _reference("pool_id", "pools.id", ondelete="SET NULL"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
    )
    op.create_table(
        "aliases",
        sa.Column("id", sa.Text, primary_key=True),
        _reference("owner_tenant_id", "tenants.id"),
        sa.Column("target", sa.Text, nullable=False),
        _reference("model_id", "models.id", nullable=False),
        _reference("release_id", "releases.id"),
    )
    op.execute(NAME_RELEASES)
    op.execute(RECORD_RELEASES)
    # A table with triggers that wait for the commit cannot be altered by a later migration.
    op.execute("SET CONSTRAINTS ALL IMMEDIATE")
    op.execute("SET CONSTRAINTS ALL DEFERRED")
    for table in WATCHED:
        for event, condition in (
            ("INSERT OR DELETE", ""),
            ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)"),
        ):
            op.execute(
                f"CREATE CONSTRAINT TRIGGER {table}_changed_by_{event.split()[-1].lower()} "
                f"AFTER {event} ON {table} DEFERRABLE INITIALLY DEFERRED "
                f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('{table}', 'id')"
            )
    # Readers that know the version before this one are missing the releases.
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0004')")


def downgrade() -> None:
    for table in reversed(WATCHED):
        op.drop_table(table)
    for table, names in (
        ("api_keys", ("models", "scopes", "requests_max")),
        ("tenants", ("fallbacks", "limits")),
        ("tiers", ("model_limits", "requests_max")),
    ):
        for name in names:
            op.drop_column(table, name)
