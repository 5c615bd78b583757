-- How long a request waited until its adapter was fetched and in its engine's memory, a part of
-- `engine_queue_us`; 0: it was there, or there is none.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS load_us UInt32 CODEC(T64, ZSTD(1)) AFTER engine_queue_us;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS load_us UInt32 CODEC(T64, ZSTD(1)) AFTER engine_queue_us;

ALTER TABLE attempts {{on_cluster}}
    ADD COLUMN IF NOT EXISTS load_us UInt32 CODEC(T64, ZSTD(1)) AFTER engine_queue_us;

-- What requests said and were answered, redacted, of tenants that opted in. Each row says itself when
-- it goes; until a merge has taken it away, queries leave it out.
CREATE TABLE IF NOT EXISTS texts {{on_cluster}}
(
    event_id String CODEC(ZSTD(1)),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    tenant_id LowCardinality(String),
    request_id String CODEC(ZSTD(1)),
    model LowCardinality(String),
    endpoint LowCardinality(String),
    prompt String CODEC(ZSTD(3)),
    answers String CODEC(ZSTD(3)),
    is_prompt_cut Bool,
    is_answer_cut Bool,
    redactions Map(LowCardinality(String), UInt32),
    outcome LowCardinality(String),
    expires_at DateTime('UTC'),
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1)),
    INDEX request_id_bloom request_id TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id)
TTL expires_at
SETTINGS merge_with_ttl_timeout = 3600;

-- Which tenants' texts were erased, and up to which time of receipt: those that come later, from a
-- spool or the broker, are left out of queries and erased, too.
CREATE TABLE IF NOT EXISTS text_erasures {{on_cluster}}
(
    tenant_id String,
    until DateTime64(3, 'UTC')
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(until)
ORDER BY tenant_id
TTL toDateTime(until) + INTERVAL 400 DAY;
