-- What routers tell of requests whose gateway they have lost, one row per answer and teller. Telemetry
-- makes a row of `requests` of those whose gateway has not told of them itself. Columns as there, but
-- for `part`: which of the request's answers.
CREATE TABLE IF NOT EXISTS closings {{on_cluster}}
(
    event_id String CODEC(ZSTD(1)),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    schema_version UInt16,
    request_id String CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    tenant_id LowCardinality(String),
    key_id String CODEC(ZSTD(1)),
    tier_id LowCardinality(String),
    session_hash UInt64 CODEC(ZSTD(1)),
    model LowCardinality(String),
    requested_model LowCardinality(String),
    release LowCardinality(String),
    base_digest LowCardinality(String),
    adapter_digest LowCardinality(String),
    pool_id LowCardinality(String),
    cell_id LowCardinality(String),
    replica_id LowCardinality(String),
    router_id LowCardinality(String),
    gateway_id LowCardinality(String),
    endpoint LowCardinality(String),
    is_stream Bool,
    prompt_tokens UInt32 CODEC(T64, ZSTD(1)),
    cached_tokens UInt32 CODEC(T64, ZSTD(1)),
    output_tokens UInt32 CODEC(T64, ZSTD(1)),
    gateway_us UInt32 CODEC(T64, ZSTD(1)),
    queue_us UInt32 CODEC(T64, ZSTD(1)),
    engine_queue_us UInt32 CODEC(T64, ZSTD(1)),
    prefill_us UInt32 CODEC(T64, ZSTD(1)),
    ttft_us UInt32 CODEC(T64, ZSTD(1)),
    total_us UInt32 CODEC(T64, ZSTD(1)),
    itl_max_us UInt32 CODEC(T64, ZSTD(1)),
    outcome LowCardinality(String),
    status UInt16,
    resumes UInt16,
    rollout_id LowCardinality(String),
    arm UInt8,
    is_pinned Bool,
    is_copy Bool,
    is_refusal Bool,
    choices UInt32,
    part UInt32,
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree()
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id, part, router_id, output_tokens)
TTL toDateTime(ingested_at) + INTERVAL 30 DAY;
