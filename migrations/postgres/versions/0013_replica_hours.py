"""Replica-hours: which replica held its place on which node, from when to when."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# An interval ends at the last moment its node was seen, and the next one of its replica begins
# there. Replicas that were lost (5) or have stopped (6) hold nothing.
RECORD = """
CREATE FUNCTION record_replica_interval() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    moment timestamptz := clock_timestamp();
    seen timestamptz;
    ended timestamptz;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        SELECT seen_at INTO seen FROM nodes WHERE id = OLD.node_id;
        UPDATE replica_intervals
            SET ended_at = greatest(began_at, least(moment, seen))
            WHERE replica_id = OLD.id AND ended_at IS NULL
            RETURNING ended_at INTO ended;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        IF NEW.state NOT IN (5, 6) THEN
            INSERT INTO replica_intervals
                (replica_id, pool_id, node_id, cell_id, region, is_running, accelerators, began_at)
            SELECT NEW.id, NEW.pool_id, NEW.node_id, NEW.cell_id, nodes.region,
                NEW.state IN (2, 3), cardinality(NEW.accelerators), coalesce(ended, moment)
            FROM nodes WHERE nodes.id = NEW.node_id
            ON CONFLICT (replica_id) WHERE ended_at IS NULL DO NOTHING;
        END IF;
    END IF;
    RETURN NULL;
END
$$
"""
WHEN = {
    "INSERT": "",
    "UPDATE": "WHEN (old.state <> new.state OR old.cell_id <> new.cell_id)",
    "DELETE": "",
}


def upgrade() -> None:
    op.create_table(
        "replica_intervals",
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("pool_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("cell_id", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("is_running", sa.Boolean(), nullable=False),
        sa.Column("accelerators", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
    )
    op.create_index(
        "ix_replica_intervals_open",
        "replica_intervals",
        ["replica_id"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index("ix_replica_intervals_ended_at", "replica_intervals", ["ended_at"])
    op.execute(RECORD)
    for event, condition in WHEN.items():
        op.execute(
            f"CREATE TRIGGER replicas_interval_by_{event.lower()} AFTER {event} ON replicas "
            f"FOR EACH ROW {condition} EXECUTE FUNCTION record_replica_interval()"
        )
    op.execute(
        "INSERT INTO replica_intervals"
        " (replica_id, pool_id, node_id, cell_id, region, is_running, accelerators, began_at)"
        " SELECT r.id, r.pool_id, r.node_id, r.cell_id, n.region, r.state IN (2, 3),"
        " cardinality(r.accelerators), clock_timestamp()"
        " FROM replicas r JOIN nodes n ON n.id = r.node_id WHERE r.state NOT IN (5, 6)"
    )


def downgrade() -> None:
    for event in WHEN:
        op.execute(f"DROP TRIGGER replicas_interval_by_{event.lower()} ON replicas")
    op.execute("DROP FUNCTION record_replica_interval()")
    op.drop_table("replica_intervals")
