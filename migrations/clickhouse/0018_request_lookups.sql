-- Where requests are, for questions that name no tenant: `requests` lies by tenant, so that a look at
-- all tenants would read a piece of each. Both are filled by views, for what comes from now on; rows
-- that came before are found in `requests` itself.

-- A request's place in `requests` by the id that its client knows.
CREATE TABLE IF NOT EXISTS request_ids {{on_cluster}}
(
    request_id String CODEC(ZSTD(1)),
    tenant_id LowCardinality(String),
    received_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1)),
    event_id String CODEC(ZSTD(1)),
    ingested_at DateTime64(3, 'UTC') CODEC(Delta(8), ZSTD(1))
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toYYYYMM(received_at)
ORDER BY (request_id, tenant_id, received_at, event_id);

CREATE MATERIALIZED VIEW IF NOT EXISTS request_ids_of_requests {{on_cluster}} TO request_ids AS
SELECT request_id, tenant_id, received_at, event_id, ingested_at
FROM requests;

-- The requests of the last two days by time, with all columns. A migration that adds a column to
-- `requests` adds it here and to the view.
CREATE TABLE IF NOT EXISTS recent_requests {{on_cluster}} AS requests
ENGINE = {{engine_prefix}}ReplacingMergeTree(ingested_at)
PARTITION BY toDate(received_at, 'UTC')
ORDER BY (received_at, tenant_id, event_id)
TTL toDateTime(received_at) + INTERVAL 2 DAY
SETTINGS ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS recent_requests_of_requests {{on_cluster}} TO recent_requests AS
SELECT *
FROM requests
WHERE received_at > now64(3) - toIntervalDay(2);
