"""Tables of complete artifacts by node, as agents last reported, and of the fleet's secrets."""

from sqlalchemy import Column, DateTime, LargeBinary, Table, Text, func

from control_plane.tables import metadata

# No foreign keys: an agent may speak of its artifacts before its node is known, and of artifacts
# that were put there by hand.
node_artifacts = Table(
    "node_artifacts",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("digest", Text, primary_key=True, index=True),
    Column("since", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

fleet_secrets = Table(
    "fleet_secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("secret", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
