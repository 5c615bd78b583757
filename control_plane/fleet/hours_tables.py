"""The intervals in which replicas occupied nodes, written by the triggers of migration 0013.

A trigger writes an interval in the transaction of every change, even when a pool is deleted with
its replicas. The table has no foreign keys, because paid time must outlive pools and nodes.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)

from control_plane.tables import metadata

# A replica that is starting or has failed occupies its node and its accelerators as well.
# `is_running` separates these two cases from a replica that serves. An open interval lasts until
# its node was last seen.
replica_intervals = Table(
    "replica_intervals",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    *(
        Column(name, Text, nullable=False)
        for name in ("replica_id", "pool_id", "node_id", "cell_id", "region")
    ),
    Column("is_running", Boolean, nullable=False),
    # number of accelerators assigned to the replica, or 0 if it may use all accelerators of the
    # node
    Column("accelerators", Integer, nullable=False),
    Column("began_at", DateTime(timezone=True), nullable=False),
    Column("ended_at", DateTime(timezone=True), index=True),
    Index(
        "ix_replica_intervals_open",
        "replica_id",
        unique=True,
        postgresql_where=text("ended_at IS NULL"),
    ),
)
