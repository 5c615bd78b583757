-- What requests add up to, per minute and per hour. `telemetry.rollups` says how rows are made: one
-- per stretch of time and what requests have in common, made anew from all its events whenever some
-- came; the newest version counts. `late_id` is empty, or the event of a row that was added after
-- events of its time may have been deleted. Counts and sums as in `telemetry.usage`.
CREATE TABLE IF NOT EXISTS usage_minutes {{on_cluster}}
(
    start DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    tenant_id LowCardinality(String),
    late_id String CODEC(ZSTD(1)),
    key_id String CODEC(ZSTD(1)),
    model LowCardinality(String),
    release LowCardinality(String),
    pool_id LowCardinality(String),
    is_copy Bool,
    requests UInt64 CODEC(T64, ZSTD(1)),
    failed UInt64 CODEC(T64, ZSTD(1)),
    prompt UInt64 CODEC(T64, ZSTD(1)),
    cached UInt64 CODEC(T64, ZSTD(1)),
    output UInt64 CODEC(T64, ZSTD(1)),
    late UInt64 CODEC(T64, ZSTD(1)),
    late_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    version DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(version)
PARTITION BY toYYYYMM(start)
ORDER BY (tenant_id, start, late_id, key_id, model, release, pool_id, is_copy);

CREATE TABLE IF NOT EXISTS usage_hours {{on_cluster}}
(
    start DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    tenant_id LowCardinality(String),
    late_id String CODEC(ZSTD(1)),
    key_id String CODEC(ZSTD(1)),
    model LowCardinality(String),
    release LowCardinality(String),
    pool_id LowCardinality(String),
    is_copy Bool,
    requests UInt64 CODEC(T64, ZSTD(1)),
    failed UInt64 CODEC(T64, ZSTD(1)),
    prompt UInt64 CODEC(T64, ZSTD(1)),
    cached UInt64 CODEC(T64, ZSTD(1)),
    output UInt64 CODEC(T64, ZSTD(1)),
    late UInt64 CODEC(T64, ZSTD(1)),
    late_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    version DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(version)
PARTITION BY toYYYYMM(start)
ORDER BY (tenant_id, start, late_id, key_id, model, release, pool_id, is_copy);

-- Which minutes of which tenants got rows, and when: written with them, by the view below. What is
-- marked later than `rollup_progress` says is not in the rollups.
CREATE TABLE IF NOT EXISTS rollup_marks {{on_cluster}}
(
    marked_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    tenant_id LowCardinality(String),
    minute DateTime('UTC') CODEC(Delta(4), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree()
PARTITION BY toDate(marked_at)
ORDER BY (marked_at, tenant_id, minute)
TTL toDateTime(marked_at) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS rollup_marks_of_requests {{on_cluster}} TO rollup_marks AS
SELECT DISTINCT now64(3, 'UTC') AS marked_at, tenant_id, toStartOfMinute(received_at, 'UTC') AS minute
FROM requests;

CREATE TABLE IF NOT EXISTS rollup_progress {{on_cluster}}
(
    name String,
    until DateTime64(3, 'UTC')
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(until)
ORDER BY name;
