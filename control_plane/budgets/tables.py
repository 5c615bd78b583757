"""Tables of budgets and of their usage.

The stops for gateways (`budget_stops`) are in `control_plane.tables`, with all other data that is
sent to gateways.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    func,
    text,
)

from control_plane.tables import metadata, sum_column, words_column

budgets = Table(
    "budgets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),  # unique within the tenant, and shown to people
    words_column("model_id"),  # model of the budget, empty for all models
    Column("unit", Text, nullable=False),
    Column("amount", BigInteger, CheckConstraint("amount >= 1", name="amount"), nullable=False),
    Column("period", Text, nullable=False),
    Column(
        "cached_percent",
        Integer,
        CheckConstraint("cached_percent BETWEEN 0 AND 100", name="cached_percent"),
        nullable=False,
        server_default="100",
    ),
    Column("soft_percents", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("on_exhausted", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
Index("uq_budgets_name", budgets.c.tenant_id, budgets.c.name, unique=True)

# The ledger's usage of the period at the last query. Before the first query, there is no row.
budget_states = Table(
    "budget_states",
    metadata,
    Column("budget_id", Text, ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True),
    sum_column("starts_at_unix_ms"),
    sum_column("ends_at_unix_ms"),
    sum_column("requests"),
    sum_column("prompt_tokens"),
    sum_column("cached_tokens"),
    sum_column("output_tokens"),
    Column("state", Text, nullable=False, index=True),
    Column("since", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("looked_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    sum_column("ingested_until_unix_ms"),
)

# Holders of tasks that only one control plane performs at a time, and the time after which a silent
# holder loses the task.
leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
