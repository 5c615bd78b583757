-- Choices of `auto`: one row per request for it, with the models that could have answered, what each
-- would have cost, and the chance with which each was chosen (0: it could not be). `cluster` and the
-- qualities behind the choice are of `scheme`.
CREATE TABLE IF NOT EXISTS auto_choices {{on_cluster}}
(
    event_id String CODEC(ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    tenant_id LowCardinality(String),
    model LowCardinality(String),
    reason LowCardinality(String),
    scheme UInt32,
    cluster UInt32,
    models Array(LowCardinality(String)),
    releases Array(LowCardinality(String)),
    costs Array(Float64),
    qualities Array(Float64),
    propensities Array(Float64),
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (tenant_id, received_at, event_id)
TTL toDateTime(ingested_at) + INTERVAL 90 DAY;

-- Judgements of answers by those who got them: the last one of each answer counts. `answer` is the id
-- of the request's event, or the request's own id; it counts for the tenant's own requests alone.
CREATE TABLE IF NOT EXISTS feedback {{on_cluster}}
(
    tenant_id LowCardinality(String),
    answer String CODEC(ZSTD(1)),
    good Float64,
    judged_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(judged_at)
PARTITION BY toYYYYMM(ingested_at)
ORDER BY (tenant_id, answer)
TTL toDateTime(ingested_at) + INTERVAL 90 DAY;
