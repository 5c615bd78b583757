"""The schema of PostgreSQL, as SQLAlchemy sees it; migrations/postgres makes it.

Tables whose rows readers of `Watch` receive have the column names of control.proto. Triggers (in
the migration) write every change of a watched column into `changes`, in the order of commits.
"""

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


def _count(name: str) -> Column[int]:
    return Column(
        name,
        Integer,
        CheckConstraint(f"{name} >= 0", name=name),
        nullable=False,
        server_default="0",
    )


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default=text("false"))


def _words(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default="")


def _object(name: str) -> Column[Any]:
    return Column(name, JSONB, nullable=False, server_default=text("'{}'::jsonb"))


def _list(name: str) -> Column[list[str]]:
    return Column(name, ARRAY(Text), nullable=False, server_default=text("'{}'"))


tiers = Table(
    "tiers",
    metadata,
    Column("id", Text, primary_key=True),
    _count("priority"),
    _count("rpm"),
    _count("tpm"),
    _count("context_tokens_max"),
    _count("ttft_deadline_ms"),
    Column(
        "reserved_permille",
        Integer,
        CheckConstraint("reserved_permille BETWEEN 0 AND 1000", name="reserved_permille"),
        nullable=False,
        server_default="0",
    ),
    _flag("is_preemptible"),
    _count("requests_max"),
    _object("model_limits"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    _words("name"),
    Column("tier_id", Text, ForeignKey("tiers.id"), nullable=False, index=True),
    Column("cache_salt", LargeBinary, nullable=False),
    _flag("is_disabled"),
    Column("weight", Integer, CheckConstraint("weight >= 1", name="weight"), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _object("limits"),
    _object("fallbacks"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("secret_sha256", LargeBinary, nullable=False, unique=True),
    Column("expires_at_unix_ms", BigInteger, nullable=False, server_default="0"),
    _flag("is_disabled"),
    _count("rpm"),
    _count("tpm"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _count("requests_max"),
    _list("scopes"),
    _list("models"),
)

bases = Table(
    "bases",
    metadata,
    Column("digest", Text, primary_key=True),
    _words("name"),
    _count("context_tokens_max"),
)

pools = Table(
    "pools",
    metadata,
    Column("id", Text, primary_key=True),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    Column("engine", Text, nullable=False),
    _count("replicas_wanted"),
    _object("engine_options"),
    Column(
        "cell_replicas_max",
        Integer,
        CheckConstraint("cell_replicas_max >= 0", name="cell_replicas_max"),
        nullable=False,
        server_default="64",
    ),
    _object("roles"),
)

models = Table(
    "models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    _words("adapter_digest"),
    _words("release"),
    Column("owner_tenant_id", Text, ForeignKey("tenants.id"), index=True),
    Column("created_at_unix_s", BigInteger, nullable=False),
    Column("pool_id", Text, ForeignKey("pools.id"), nullable=False, index=True),
)

# What a model was, is or shall be. The digests of a release never change; where it is served may.
releases = Table(
    "releases",
    metadata,
    Column("id", Text, primary_key=True),  # model@release
    Column(
        "model_id", Text, ForeignKey("models.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    _words("adapter_digest"),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="SET NULL"), index=True),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# `target` is what readers are told; the columns behind it keep what it names from going away.
aliases = Table(
    "aliases",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner_tenant_id", Text, ForeignKey("tenants.id"), index=True),
    Column("target", Text, nullable=False),
    Column("model_id", Text, ForeignKey("models.id"), nullable=False, index=True),
    Column("release_id", Text, ForeignKey("releases.id"), index=True),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    _count("cpu_count"),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    _list("accelerators"),
    _list("engines"),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _flag("is_lost"),
    _flag("is_cordoned"),
    _words("cordon_reason"),
)

routers = Table(
    "routers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("address", Text, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("left_at", DateTime(timezone=True)),
    Column("came_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _flag("is_gone"),
)

cells = Table(
    "cells",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), nullable=False, index=True),
    _words("router_id"),
    _words("router_address"),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    _flag("is_draining"),
    Column("draining_since", DateTime(timezone=True)),
    Column("assigned_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

replicas = Table(
    "replicas",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("cell_id", Text, ForeignKey("cells.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("node_id", Text, ForeignKey("nodes.id"), nullable=False, index=True),
    _flag("is_draining"),
    Column("state", SmallInteger, nullable=False),
    _words("grpc_address"),
    _words("triton_model"),
    _words("profile"),
    _words("role"),
    # What the agent says beside it; not watched, because it changes with every heartbeat.
    _words("metrics_address"),
    _count("pid"),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    _count("restarts"),
    _words("message"),
)

changes = Table(
    "changes",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("object_id", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
