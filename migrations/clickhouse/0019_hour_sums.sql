-- What requests of an hour took of a pool: for pages of costs, never for bills. A day is summed anew
-- when events of it came; the newest version of a row counts. `kind` says what `name` names: each
-- request is in a row of its model and in one of its tenant.
CREATE TABLE IF NOT EXISTS work_hours {{on_cluster}}
(
    start DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    kind LowCardinality(String),
    pool_id LowCardinality(String),
    name LowCardinality(String),
    is_copy Bool,
    requests Float64,
    uncached_tokens Float64,
    cached_tokens Float64,
    output_tokens Float64,
    attended_tokens Float64,
    version DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(version)
PARTITION BY toYYYYMM(start)
ORDER BY (kind, start, pool_id, name, is_copy)
TTL start + INTERVAL 400 DAY
SETTINGS ttl_only_drop_parts = 1;

-- How long replicas of a pool had requests in an hour, and how long these were there together.
CREATE TABLE IF NOT EXISTS busy_hours {{on_cluster}}
(
    start DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    pool_id LowCardinality(String),
    busy_s Float64,
    request_s Float64,
    version DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(version)
PARTITION BY toYYYYMM(start)
ORDER BY (start, pool_id)
TTL start + INTERVAL 400 DAY
SETTINGS ttl_only_drop_parts = 1;

-- What hours add up to, by time and not by tenant: for pages that look at the hours of all tenants.
CREATE TABLE IF NOT EXISTS usage_hour_sums {{on_cluster}}
(
    start DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    tenant_id LowCardinality(String),
    key_id String CODEC(ZSTD(1)),
    model LowCardinality(String),
    requests UInt64 CODEC(T64, ZSTD(1)),
    failed UInt64 CODEC(T64, ZSTD(1)),
    prompt UInt64 CODEC(T64, ZSTD(1)),
    cached UInt64 CODEC(T64, ZSTD(1)),
    output UInt64 CODEC(T64, ZSTD(1)),
    version DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(version)
PARTITION BY toDate(start, 'UTC')
ORDER BY (start, tenant_id, key_id, model)
TTL start + INTERVAL 31 DAY
SETTINGS ttl_only_drop_parts = 1;
