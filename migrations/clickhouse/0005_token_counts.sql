-- Output tokens that routers got from engines, by model and by the hour in which their requests were
-- received: sums since the start (epoch) of each router, a higher number replaces a lower one. Model
-- '' says until when a router was there.
CREATE TABLE IF NOT EXISTS token_counts {{on_cluster}}
(
    hour DateTime64(3, 'UTC'),
    model LowCardinality(String),
    router_id LowCardinality(String),
    epoch UInt64,
    number UInt64,
    output_tokens UInt64,
    uncertain_tokens UInt64,
    discarded_tokens UInt64,
    is_last Bool,
    ingested_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = {{engine_prefix}}ReplacingMergeTree(number)
PARTITION BY toYYYYMM(hour)
ORDER BY (hour, model, router_id, epoch)
TTL toDateTime(hour) + INTERVAL 400 DAY;
