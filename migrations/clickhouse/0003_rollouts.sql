-- Which arm of a rollout answered, and copies of shadow stages: rows of `requests` that no client
-- waits for, so whatever counts clients' requests leaves `is_copy` out. In rows of older gateways:
-- no rollout, no copy, no choices (one answer).
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS rollout_id LowCardinality(String) AFTER release,
    ADD COLUMN IF NOT EXISTS arm UInt8 AFTER rollout_id,
    ADD COLUMN IF NOT EXISTS is_pinned Bool AFTER arm,
    ADD COLUMN IF NOT EXISTS is_copy Bool AFTER is_pinned,
    ADD COLUMN IF NOT EXISTS is_refusal Bool AFTER is_copy,
    ADD COLUMN IF NOT EXISTS choices UInt32 AFTER is_refusal;
