-- What hours add up to, per day: for pages that look at all tenants, never for bills. A day is summed
-- anew, for all tenants, when hours of it were; the newest version of a row counts.
CREATE TABLE IF NOT EXISTS usage_days {{on_cluster}}
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
PARTITION BY toYYYYMM(start)
ORDER BY (start, tenant_id, key_id, model)
TTL start + INTERVAL 1200 DAY
SETTINGS ttl_only_drop_parts = 1;
