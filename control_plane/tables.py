"""The tables of tenants, models and fleet, and helpers for the tables of other domains.

The scripts in migrations/postgres create the tables. Module `schema` lists all tables.

Tables that are sent to readers of `Watch` have the column names of control.proto. Triggers (in the
migration) record every change of a watched column in `changes`, in the order of commits.
"""

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from sluice.limits import METERED_NAMES, NAMES

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


def count_column(name: str) -> Column[int]:
    """Return a column of non-negative integers, 0 by default."""
    return Column(
        name,
        Integer,
        CheckConstraint(f"{name} >= 0", name=name),
        nullable=False,
        server_default="0",
    )


def sum_column(name: str) -> Column[int]:
    """Return a 64-bit column for sums and for times in Unix milliseconds, 0 by default."""
    return Column(name, BigInteger, nullable=False, server_default="0")


def flag_column(name: str) -> Column[bool]:
    """Return a boolean column that is false by default."""
    return Column(name, Boolean, nullable=False, server_default=text("false"))


def words_column(name: str) -> Column[str]:
    """Return a text column that is empty by default."""
    return Column(name, Text, nullable=False, server_default="")


def number_column(name: str) -> Column[float]:
    """Return a column of non-negative floats, 0 by default."""
    return Column(
        name,
        Double,
        CheckConstraint(f"{name} >= 0", name=name),
        nullable=False,
        server_default="0",
    )


def object_column(name: str) -> Column[Any]:
    """Return a column of JSON objects."""
    return Column(name, JSONB, nullable=False, server_default=text("'{}'::jsonb"))


def list_column(name: str) -> Column[list[str]]:
    """Return a column of lists of texts."""
    return Column(name, ARRAY(Text), nullable=False, server_default=text("'{}'"))


tiers = Table(
    "tiers",
    metadata,
    Column("id", Text, primary_key=True),
    count_column("priority"),
    *(count_column(name) for name in NAMES),
    count_column("ttft_deadline_ms"),
    Column(
        "reserved_permille",
        Integer,
        CheckConstraint("reserved_permille BETWEEN 0 AND 1000", name="reserved_permille"),
        nullable=False,
        server_default="0",
    ),
    flag_column("is_preemptible"),
    object_column("model_limits"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    words_column("name"),
    Column("tier_id", Text, ForeignKey("tiers.id"), nullable=False, index=True),
    Column("cache_salt", LargeBinary, nullable=False),
    flag_column("is_disabled"),
    Column("weight", Integer, CheckConstraint("weight >= 1", name="weight"), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    object_column("limits"),
    object_column("fallbacks"),
    object_column("pins"),
    flag_column("allows_server_urls"),
    count_column("gather_ms"),
    count_column("retention_hours"),
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
    flag_column("is_disabled"),
    *(count_column(name) for name in METERED_NAMES),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    list_column("scopes"),
    list_column("models"),
    count_column("interval_ms"),
)

bases = Table(
    "bases",
    metadata,
    Column("digest", Text, primary_key=True),
    words_column("name"),
    count_column("context_tokens_max"),
    # Token ids of the prompt that routers send to probe engines. The list is empty until the base's
    # tokenizer was read.
    Column("canary_token_ids", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
)

pools = Table(
    "pools",
    metadata,
    Column("id", Text, primary_key=True),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    Column("engine", Text, nullable=False),
    count_column("replicas_wanted"),
    object_column("engine_options"),
    Column(
        "cell_replicas_max",
        Integer,
        CheckConstraint("cell_replicas_max >= 0", name="cell_replicas_max"),
        nullable=False,
        server_default="64",
    ),
    object_column("roles"),
    object_column("needs"),
    # The first column is the number of replicas that rollouts need in this pool (`pool_demands`).
    # The second is the time at which the pool is retired after a rollout. The fleet writes both
    # columns. Operators write `replicas_wanted`.
    Column(
        "rollout_replicas",
        Integer,
        CheckConstraint("rollout_replicas >= 0", name="rollout_replicas"),
    ),
    Column("retire_at", DateTime(timezone=True)),
    # Number of replicas that the scaling loop wants instead of `replicas_wanted`, NULL if the pool
    # is not scaled.
    Column(
        "scaled_replicas",
        Integer,
        CheckConstraint("scaled_replicas >= 0", name="scaled_replicas"),
    ),
    count_column("scaled_sleepers"),  # sleeping replicas, in addition to `scaled_replicas`
    # Number of `scaled_replicas` that only prefill, NULL if `roles` is in effect.
    Column("scaled_prefill", Integer),
)

# Reason why a pool lacks wanted replicas. A pool without a row has all replicas, or will have them
# soon.
pool_conditions = Table(
    "pool_conditions",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("text", Text, nullable=False),
    Column("unplaced", Integer, nullable=False, server_default="0"),
    Column("since", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# Number of replicas that the rollout of a model needs in a pool. The need begins at `asked_at`, and
# after the rollout it ends at `ends_at`.
pool_demands = Table(
    "pool_demands",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column(
        "model_id",
        Text,
        ForeignKey("models.id", ondelete="CASCADE"),
        primary_key=True,
        index=True,
    ),
    Column("replicas", Integer, CheckConstraint("replicas >= 0", name="replicas"), nullable=False),
    Column("asked_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("ends_at", DateTime(timezone=True)),
)

models = Table(
    "models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    words_column("adapter_digest"),
    words_column("release"),
    words_column("previous_release"),  # release that the model pointed at before, empty if none
    Column("owner_tenant_id", Text, ForeignKey("tenants.id"), index=True),
    Column("created_at_unix_s", BigInteger, nullable=False),
    Column("pool_id", Text, ForeignKey("pools.id"), nullable=False, index=True),
)

# Past, present and future releases of models. The digests of a release never change, but the pool
# of a release may change.
releases = Table(
    "releases",
    metadata,
    Column("id", Text, primary_key=True),  # `model@release`
    Column(
        "model_id", Text, ForeignKey("models.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False, index=True),
    words_column("adapter_digest"),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="SET NULL"), index=True),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# Shares of requests per release for the models in rollout. Only the loop of rollouts writes them.
splits = Table(
    "splits",
    metadata,
    Column("id", Text, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("rollout_id", Text, nullable=False),
    Column("control", Text, nullable=False),
    Column("canary", Text, nullable=False),
    count_column("share"),
    count_column("mirrored"),
    Column("salt", Text, nullable=False),
)

# Exhausted budgets of a tenant, for which gateways reject the tenant's requests. Rows are written
# together with the states of the budgets. A tenant without a row has no exhausted budget.
budget_stops = Table(
    "budget_stops",
    metadata,
    Column("id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("stops", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
)

# Whether gateways store the texts of a tenant's requests. Without a row, texts are not stored.
text_policies = Table(
    "text_policies",
    metadata,
    Column("id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    flag_column("is_on"),
    Column(
        "share",
        Integer,
        CheckConstraint("share BETWEEN 0 AND 10000", name="share"),
        nullable=False,
        server_default="0",
    ),
    Column(
        "retention_days",
        Integer,
        CheckConstraint("retention_days BETWEEN 1 AND 365", name="retention_days"),
        nullable=False,
        server_default="1",
    ),
    list_column("redacted"),
    list_column("words"),
)

# Rules on a tenant's prompts and answers, in the newest version and in the version in effect.
guard_sets = Table(
    "guard_sets",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "owner_tenant_id",
        Text,
        ForeignKey("tenants.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    list_column("models"),
    list_column("keys"),
    count_column("version"),
    Column("rules", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    count_column("active_version"),
    Column("active_rules", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    flag_column("is_withheld_free"),
    Column("fence", Text, nullable=False, server_default="sentence"),
    Column("fence_tokens", Integer, nullable=False, server_default="32"),
    flag_column("is_closed_on_failure"),
)

# Tools that gateways call for a tenant's models. Secret headers are encrypted.
server_tools = Table(
    "server_tools",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "owner_tenant_id",
        Text,
        ForeignKey("tenants.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("kind", Text, CheckConstraint("kind IN ('http', 'mcp')", name="kind"), nullable=False),
    Column("name", Text, nullable=False),
    words_column("description"),
    words_column("parameters"),
    Column("url", Text, nullable=False),
    words_column("method"),
    count_column("timeout_ms"),
    count_column("result_bytes_max"),
    object_column("secret_headers"),
    flag_column("is_idempotent"),
    words_column("approval"),
    list_column("allowed_tools"),
    list_column("models"),
    list_column("keys"),
    count_column("price_micros"),
    UniqueConstraint("owner_tenant_id", "name"),
)

# The models that `auto` may choose from for a tenant, and the judgements of their past answers.
auto_policies = Table(
    "auto_policies",
    metadata,
    Column("id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("candidates", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    number_column("price_max"),
    number_column("quality_min"),
    number_column("second_price"),
    number_column("miss_price"),
    number_column("explored_share"),
    count_column("queue_priority_min"),
    words_column("pin"),
    count_column("scheme"),
    Column("cells", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
)

# System prompts of models. Engines keep the KV blocks of these prompts in their caches.
warm_prompts = Table(
    "warm_prompts",
    metadata,
    Column("id", Text, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    list_column("prompts"),
)

# The pools of a model that several pools serve, each with pool_id, weight, price and is_other_base.
model_pools = Table(
    "model_pools",
    metadata,
    Column("id", Text, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("pools", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
)

# Keys that encrypt a tenant's stored content. The keys themselves are encrypted. Content from
# before `erased_at_unix_ms` has been erased.
content_keys = Table(
    "content_keys",
    metadata,
    Column("id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("keys", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    sum_column("erased_at_unix_ms"),
)

# Readers receive `target`. The other target columns protect the target object from deletion.
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
    count_column("cpu_count"),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    list_column("accelerators"),
    list_column("engines"),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    flag_column("is_lost"),
    flag_column("is_cordoned"),
    words_column("cordon_reason"),
    # Orders of operators for the node, and their progress.
    flag_column("is_unschedulable"),
    flag_column("is_draining"),
    words_column("order_reason"),
    words_column("drain_note"),
    flag_column("is_surplus"),  # scaling will release the node, so the node drains
    flag_column("is_vacated"),  # scaling moves the node's replicas away, or has done so
    Column("accelerator_facts", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    # ids of lifted cordons, kept until the agent no longer reports them
    list_column("lifted_cordons"),
    words_column("region"),
    words_column("rack"),
)

routers = Table(
    "routers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("address", Text, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("left_at", DateTime(timezone=True)),
    Column("came_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    flag_column("is_gone"),
)

cells = Table(
    "cells",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), nullable=False, index=True),
    words_column("router_id"),
    words_column("router_address"),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    flag_column("is_draining"),
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
    flag_column("is_draining"),
    flag_column("is_quarantined"),  # the replica drains because it answered wrongly
    flag_column("sleeps"),  # desired state, in which the engine releases its KV memory
    Column("state", SmallInteger, nullable=False),
    words_column("grpc_address"),
    words_column("triton_model"),
    words_column("profile"),
    words_column("role"),
    # Resources of the node that were assigned to the replica at its creation, and that never
    # change.
    Column("accelerators", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    object_column("reservation"),
    # Further facts from the agent, which are not watched because they change with every heartbeat.
    words_column("metrics_address"),
    count_column("pid"),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    count_column("restarts"),
    words_column("message"),
)

changes = Table(
    "changes",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("object_id", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
