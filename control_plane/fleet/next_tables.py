"""Nodes on which the next replicas of pools would be placed. They fetch the pools' bases ahead."""

from sqlalchemy import Column, ForeignKey, Table, Text

from control_plane.tables import metadata

next_places = Table(
    "next_places",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
)
