-- Where the answers of a request ran, one row per submission to a router: of requests of which this
-- says more than their row does (resumed, refused with a reason, several answers, or with what the
-- router knew). Moments are microseconds since the request was received; `decision` holds the
-- bytes of a message sluice.wire.router.v1.Explanation, none where it is not known.
CREATE TABLE IF NOT EXISTS attempts {{on_cluster}}
(
    event_id String CODEC(ZSTD(1)),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    tenant_id LowCardinality(String),
    part UInt32,
    number UInt32,
    cell_id LowCardinality(String),
    router_id LowCardinality(String),
    replica_id LowCardinality(String),
    submitted_us UInt32 CODEC(T64, ZSTD(1)),
    first_us UInt32 CODEC(T64, ZSTD(1)),
    ended_us UInt32 CODEC(T64, ZSTD(1)),
    queue_us UInt32 CODEC(T64, ZSTD(1)),
    engine_queue_us UInt32 CODEC(T64, ZSTD(1)),
    prefill_us UInt32 CODEC(T64, ZSTD(1)),
    cached_tokens UInt32 CODEC(T64, ZSTD(1)),
    output_tokens UInt32 CODEC(T64, ZSTD(1)),
    outcome LowCardinality(String),
    reason String CODEC(ZSTD(1)),
    decision String CODEC(ZSTD(3)),
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id, part, number)
TTL toDateTime(ingested_at) + INTERVAL 30 DAY;
