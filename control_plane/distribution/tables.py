"""Tables of complete artifacts by node, as agents last reported, and of the fleet's secrets."""

from sqlalchemy import Column, DateTime, LargeBinary, Table, Text, func

from control_plane.tables import metadata

# There are no foreign keys. An agent may report artifacts before its node is stored, and may report
# artifacts that were copied to the node by hand.
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
