-- One row per accepted request. The same event may be inserted twice (the pipeline is at least
-- once): equal keys collapse on merge, and queries take one row per event_id.
CREATE TABLE IF NOT EXISTS requests {{on_cluster}}
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
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1)),
    INDEX received_at_range received_at TYPE minmax GRANULARITY 1,
    INDEX request_id_bloom request_id TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id);

-- Messages that are no events we understand, parked with the reason so that nothing is lost and
-- nothing stops the stream.
CREATE TABLE IF NOT EXISTS poison {{on_cluster}}
(
    topic LowCardinality(String),
    partition Int32,
    offset Int64,
    reason LowCardinality(String),
    detail String CODEC(ZSTD(1)),
    payload String CODEC(ZSTD(1)),
    payload_hash UInt64 MATERIALIZED cityHash64(payload),
    parked_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(parked_at)
PARTITION BY toYYYYMM(parked_at)
ORDER BY (topic, partition, offset, payload_hash);
