"""Tenants, models, fleet, and the record of changes that Watch is fed from."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Kind in the wire's words, table, key, and the columns whose change readers must hear of.
WATCHED = (
    ("tiers", "tiers", "id", None),
    ("tenants", "tenants", "id", None),
    ("keys", "api_keys", "id", None),
    ("bases", "bases", "digest", None),
    ("models", "models", "id", None),
    ("pools", "pools", "id", None),
    ("cells", "cells", "id", None),
    (
        "replicas",
        "replicas",
        "id",
        ("pool_id", "cell_id", "node_id", "is_draining", "state", "grpc_address", "triton_model", "profile"),
    ),
)

# Deferred to the end of the transaction, when all row locks are held: the advisory lock then makes
# versions appear in the order of commits, and cannot deadlock with them.
RECORD_CHANGE = """
CREATE FUNCTION record_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    object_id text;
BEGIN
    PERFORM pg_advisory_xact_lock(7310520301);
    IF TG_OP = 'DELETE' THEN
        object_id := to_jsonb(OLD) ->> TG_ARGV[1];
    ELSE
        object_id := to_jsonb(NEW) ->> TG_ARGV[1];
    END IF;
    INSERT INTO changes (kind, object_id) VALUES (TG_ARGV[0], object_id);
    PERFORM pg_notify('sluice_changes', '');
    RETURN NULL;
END
$$
"""


def _count(name: str) -> list[sa.Column | sa.CheckConstraint]:
    return [
        sa.Column(name, sa.Integer, server_default="0", nullable=False),
        sa.CheckConstraint(f"{name} >= 0", name=name),
    ]


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _flag(name: str) -> sa.Column:
    return sa.Column(name, sa.Boolean, server_default=sa.text("false"), nullable=False)


def _large(name: str, **options) -> sa.Column:
    return sa.Column(name, sa.BigInteger, nullable=False, **options)


def _moment(name: str) -> sa.Column:
    return sa.Column(
        name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _id(name: str = "id") -> sa.Column:
    return sa.Column(name, sa.Text, primary_key=True)


def _reference(name: str, target: str, *, nullable: bool = False, ondelete: str | None = None) -> sa.Column:
    return sa.Column(name, sa.Text, sa.ForeignKey(target, ondelete=ondelete), nullable=nullable, index=True)


def upgrade() -> None:
    op.create_table(
        "tiers",
        _id(),
        *_count("priority"),
        *_count("rpm"),
        *_count("tpm"),
        *_count("context_tokens_max"),
        *_count("ttft_deadline_ms"),
    )
    op.create_table(
        "tenants",
        _id(),
        _words("name"),
        _reference("tier_id", "tiers.id"),
        sa.Column("cache_salt", sa.LargeBinary, nullable=False),
        _flag("is_disabled"),
        sa.Column("weight", sa.Integer, nullable=False),
        sa.CheckConstraint("weight >= 1", name="weight"),
        _moment("created_at"),
    )
    op.create_table(
        "api_keys",
        _id(),
        _reference("tenant_id", "tenants.id", ondelete="CASCADE"),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False, unique=True),
        _large("expires_at_unix_ms", server_default="0"),
        _flag("is_disabled"),
        *_count("rpm"),
        *_count("tpm"),
        _moment("created_at"),
    )
    op.create_table("bases", _id("digest"), _words("name"), *_count("context_tokens_max"))
    op.create_table(
        "pools",
        _id(),
        _reference("base_digest", "bases.digest"),
        sa.Column("engine", sa.Text, nullable=False),
        *_count("replicas_wanted"),
        sa.Column(
            "engine_options", postgresql.JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False
        ),
    )
    op.create_table(
        "models",
        _id(),
        _reference("base_digest", "bases.digest"),
        _words("adapter_digest"),
        _words("release"),
        _reference("owner_tenant_id", "tenants.id", nullable=True),
        _large("created_at_unix_s"),
        _reference("pool_id", "pools.id"),
    )
    _create_fleet()
    _create_changes()


def _create_fleet() -> None:
    op.create_table(
        "nodes",
        _id(),
        *_count("cpu_count"),
        _large("memory_bytes", server_default="0"),
        sa.Column("accelerators", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("engines", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        _moment("seen_at"),
        _flag("is_lost"),
    )
    op.create_table(
        "routers",
        _id(),
        sa.Column("address", sa.Text, nullable=False),
        _moment("seen_at"),
        sa.Column("left_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "cells",
        _id(),
        _reference("pool_id", "pools.id", ondelete="CASCADE"),
        _words("router_id"),
        _words("router_address"),
        _large("epoch", server_default="0"),
    )
    op.create_table(
        "replicas",
        _id(),
        _reference("pool_id", "pools.id", ondelete="CASCADE"),
        _reference("cell_id", "cells.id", ondelete="CASCADE"),
        _reference("node_id", "nodes.id"),
        _flag("is_draining"),
        sa.Column("state", sa.SmallInteger, nullable=False),
        _words("grpc_address"),
        _words("triton_model"),
        _words("profile"),
        _words("metrics_address"),
        *_count("pid"),
        _large("memory_bytes", server_default="0"),
        *_count("restarts"),
        _words("message"),
    )


def _create_changes() -> None:
    op.create_table(
        "changes",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("object_id", sa.Text, nullable=False),
        _moment("created_at"),
    )
    # Versions of a database begin at its time of birth in microseconds, so that a reader that
    # remembers a version of a deleted database is recognized.
    op.execute(
        "SELECT setval('changes_version_seq', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
    )
    op.execute("INSERT INTO changes (kind, object_id) VALUES ('schema', '0001')")
    op.execute(RECORD_CHANGE)
    for kind, table, key, columns in WATCHED:
        old, new = ("OLD.*", "NEW.*")
        if columns is not None:
            old, new = (f"({', '.join(f'{row}.{c}' for c in columns)})" for row in ("OLD", "NEW"))
        for event, condition in (
            ("INSERT OR DELETE", ""),
            ("UPDATE", f"WHEN ({old} IS DISTINCT FROM {new})"),
        ):
            op.execute(
                f"CREATE CONSTRAINT TRIGGER {table}_changed_by_{event.split()[-1].lower()} "
                f"AFTER {event} ON {table} DEFERRABLE INITIALLY DEFERRED "
                f"FOR EACH ROW {condition} EXECUTE FUNCTION record_change('{kind}', '{key}')"
            )
