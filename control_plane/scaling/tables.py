"""Rows of scaling, for operators' settings, routers' reports, records of pools, and decisions."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    func,
)

from control_plane.tables import count_column, flag_column, metadata, object_column, words_column

# Bounds of a pool, and the number that an operator set by hand. A pool without a row is not scaled.
pool_scalings = Table(
    "pool_scalings",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    flag_column("is_on"),
    count_column("replicas_min"),
    count_column("replicas_max"),
    Column("minute_worth", Double, nullable=False, server_default="3"),
    Column("idle_s", Double, nullable=False, server_default="900"),
    Column("hold_s", Double, nullable=False, server_default="300"),
    Column("price", Double, nullable=False, server_default="0"),
    Column("sleepers_share", Double, nullable=False, server_default="0"),
    count_column("sleepers_min"),
    words_column("actuator"),  # empty if replicas run on the existing nodes
    Column(
        "replicas_per_node",
        Integer,
        CheckConstraint("replicas_per_node > 0", name="replicas_per_node"),
        nullable=False,
        server_default="1",
    ),
    flag_column("is_paused"),
    Column("pin", Integer, CheckConstraint("pin >= 0", name="pin")),
    Column("pin_until", DateTime(timezone=True)),  # NULL if only an operator removes the pin
    words_column("pinned_by"),
    Column("pin_prefill", Integer),  # pinned replicas that only prefill, NULL if demand decides
    object_column("roles"),  # bounds of single roles
)

# The loop's record of a pool between two rounds (`memory`), and its last decision (`decision`).
pool_scaling_states = Table(
    "pool_scaling_states",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    object_column("memory"),
    object_column("decision"),
    Column("decided_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# The last report of each router that owned a cell, with sums since the router began its record.
cell_demands = Table(
    "cell_demands",
    metadata,
    Column("cell_id", Text, ForeignKey("cells.id", ondelete="CASCADE"), primary_key=True),
    Column("router_id", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    object_column("report"),
    Column("received_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# The speed of a fully loaded replica. Pools with the same base, hardware and configuration share
# it.
engine_speeds = Table(
    "engine_speeds",
    metadata,
    Column("base_digest", Text, primary_key=True),
    Column("hardware", Text, primary_key=True),
    Column("configuration", Text, primary_key=True),
    Column("prompt_token_s", Double, nullable=False),
    Column("output_token_s", Double, nullable=False),
    Column("sequences", Integer, nullable=False),
    Column("measured_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# Every change of a pool's number of replicas, the newest last.
scaling_changes = Table(
    "scaling_changes",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), nullable=False),
    Column("changed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    words_column("role"),  # empty in a pool without roles
    Column("before", Integer, nullable=False),
    Column("after", Integer, nullable=False),
    Column("cause", Text, nullable=False),
    Column("text", Text, nullable=False),
)
Index("ix_scaling_changes_pool_id", scaling_changes.c.pool_id, scaling_changes.c.id)

# The numbers of each scaled pool at the first round of a minute, for charts.
scaling_minutes = Table(
    "scaling_minutes",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("minute", DateTime(timezone=True), primary_key=True, index=True),
    *(count_column(name) for name in ("wanted", "ready", "booting", "asleep")),
    Column("demand", Double, nullable=False),
)

# Bounds over all pools together, in at most one row.
scaling_budgets = Table(
    "scaling_budgets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("accelerators", Integer),  # NULL if there is no bound
    Column("price", Double),
    # price of replicas of a pool without a price, per accelerator
    Column("accelerator_price", Double, nullable=False, server_default="0"),
)

# State of the requests for nodes, one row per actuator that a pool has chosen.
actuator_asks = Table(
    "actuator_asks",
    metadata,
    Column("name", Text, primary_key=True),
    count_column("nodes_wanted"),
    count_column("nodes_present"),
    words_column("result"),
    words_column("warning"),
    Column("asked_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("short_since", DateTime(timezone=True)),  # time since which nodes are missing, or NULL
)
