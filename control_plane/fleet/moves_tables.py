"""Moves of replicas to other nodes, which empty a node. At most one move is under way."""

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Table,
    Text,
    func,
    text,
)

from control_plane.tables import metadata, words_column

# A move is under way while `ended_at` is NULL. The replica's row is deleted at its end, so there is
# no foreign key to it. `result` is `done`, `given_up` or `ended`.
replica_moves = Table(
    "replica_moves",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), nullable=False),
    *(Column(name, Text, nullable=False) for name in ("replica_id", "node_id", "moves_to")),
    Column("why", Text, nullable=False),
    Column("began_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("ended_at", DateTime(timezone=True), index=True),
    words_column("result"),
    Index(
        "ix_replica_moves_open",
        text("(ended_at IS NULL)"),
        unique=True,
        postgresql_where=text("ended_at IS NULL"),
    ),
)
