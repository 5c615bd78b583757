"""The complete PostgreSQL schema, which migrations read, and which a test compares with them.

Every domain that has tables is imported here. No other module imports this module.
"""

from control_plane.access import tables as access
from control_plane.alerts import tables as alerts
from control_plane.artifacts import tables as artifacts
from control_plane.audit import tables as audit
from control_plane.batches import tables as batches
from control_plane.budgets import tables as budgets
from control_plane.distribution import tables as distribution
from control_plane.fleet import hours_tables as hours
from control_plane.fleet import moves_tables as moves
from control_plane.fleet import next_tables as nexts
from control_plane.quality import tables as quality
from control_plane.records import tables as records
from control_plane.responses import tables as responses
from control_plane.rollouts import tables as rollouts
from control_plane.scaling import tables as scaling
from control_plane.tables import metadata

__all__ = [
    "access",
    "alerts",
    "artifacts",
    "audit",
    "batches",
    "budgets",
    "distribution",
    "hours",
    "metadata",
    "moves",
    "nexts",
    "quality",
    "records",
    "responses",
    "rollouts",
    "scaling",
]
