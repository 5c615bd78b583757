-- Calls of tools that gateways ran for models, one row per call; `received_at` is when it began. `tool_id` is
-- empty where the request named the server by its address.
CREATE TABLE IF NOT EXISTS tool_calls {{on_cluster}}
(
    event_id String CODEC(ZSTD(1)),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    tenant_id LowCardinality(String),
    key_id String CODEC(ZSTD(1)),
    model LowCardinality(String),
    gateway_id LowCardinality(String),
    endpoint LowCardinality(String),
    tool_id String CODEC(ZSTD(1)),
    kind LowCardinality(String),
    label LowCardinality(String),
    name LowCardinality(String),
    attempts UInt32 CODEC(T64, ZSTD(1)),
    duration_us UInt64 CODEC(T64, ZSTD(1)),
    outcome LowCardinality(String),
    output_bytes UInt32 CODEC(T64, ZSTD(1)),
    price_micros UInt32 CODEC(T64, ZSTD(1)),
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1)),
    INDEX by_request request_id TYPE bloom_filter(0.01) GRANULARITY 1
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id)
TTL toDateTime(ingested_at) + INTERVAL 400 DAY;
