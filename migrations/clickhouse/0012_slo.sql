-- How requests fared, per minute and model: for pages, never for bills. An event that is inserted
-- twice counts twice here. Objectives are those of `gateway.objectives`: a first token within 0.5 s
-- (of prompts above 2,048 tokens: and twice their prefill), 50 ms per token after it.
CREATE TABLE IF NOT EXISTS slo_minutes {{on_cluster}}
(
    minute DateTime('UTC') CODEC(Delta(4), ZSTD(1)),
    model LowCardinality(String),
    requests SimpleAggregateFunction(sum, UInt64),
    failed SimpleAggregateFunction(sum, UInt64),
    judged SimpleAggregateFunction(sum, UInt64),
    good SimpleAggregateFunction(sum, UInt64),
    output SimpleAggregateFunction(sum, UInt64),
    ttft AggregateFunction(quantilesTDigestIf(0.5, 0.95, 0.99), UInt32, UInt8),
    tpot AggregateFunction(quantilesTDigestIf(0.5, 0.95, 0.99), UInt32, UInt8),
    queue AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), UInt32)
)
ENGINE = {{engine_prefix}}AggregatingMergeTree()
PARTITION BY toYYYYMM(minute)
ORDER BY (minute, model)
TTL minute + INTERVAL 90 DAY
SETTINGS ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS slo_minutes_of_requests {{on_cluster}} TO slo_minutes AS
SELECT
    toStartOfMinute(received_at, 'UTC') AS minute,
    model,
    toUInt64(count()) AS requests,
    toUInt64(countIf(status >= 500)) AS failed,
    toUInt64(countIf(status >= 500 OR status < 400)) AS judged,
    toUInt64(countIf(status < 400 AND tpot_us <= 50000
        AND first_us <= 500000 + if(prompt_tokens > 2048, 2 * toUInt64(prefill_us), 0))) AS good,
    toUInt64(sum(output_tokens)) AS output,
    quantilesTDigestIfState(0.5, 0.95, 0.99)(first_us, toUInt8(status < 400)) AS ttft,
    quantilesTDigestIfState(0.5, 0.95, 0.99)(tpot_us, toUInt8(status < 400 AND tpot_us > 0)) AS tpot,
    quantilesTDigestState(0.5, 0.95, 0.99)(queue_us) AS queue
FROM
(
    SELECT received_at, model, status, prompt_tokens, prefill_us, output_tokens, queue_us,
        output_tokens / greatest(choices, 1) AS tokens_each,
        toUInt32(if(is_stream, ttft_us, gateway_us + queue_us + engine_queue_us + prefill_us))
            AS first_us,
        toUInt32(if(is_stream AND tokens_each > 1 AND total_us > ttft_us,
            (total_us - ttft_us) / (tokens_each - 1), 0)) AS tpot_us
    FROM requests
    WHERE NOT is_copy AND endpoint != '/v1/embeddings'
)
GROUP BY minute, model;
