-- The tenant's rules that texts of a request have met, as `set/rule set/rule`; output tokens that a block
-- kept from the client, and those of them that are not billed.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS guard_rules LowCardinality(String) AFTER is_limited_locally,
    ADD COLUMN IF NOT EXISTS withheld_tokens UInt32 AFTER guard_rules,
    ADD COLUMN IF NOT EXISTS unbilled_tokens UInt32 AFTER withheld_tokens;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS guard_rules LowCardinality(String) AFTER is_limited_locally,
    ADD COLUMN IF NOT EXISTS withheld_tokens UInt32 AFTER guard_rules,
    ADD COLUMN IF NOT EXISTS unbilled_tokens UInt32 AFTER withheld_tokens;

ALTER TABLE usage_minutes {{on_cluster}}
    ADD COLUMN IF NOT EXISTS withheld UInt64 CODEC(T64, ZSTD(1)) AFTER output,
    ADD COLUMN IF NOT EXISTS unbilled UInt64 CODEC(T64, ZSTD(1)) AFTER withheld;

ALTER TABLE usage_hours {{on_cluster}}
    ADD COLUMN IF NOT EXISTS withheld UInt64 CODEC(T64, ZSTD(1)) AFTER output,
    ADD COLUMN IF NOT EXISTS unbilled UInt64 CODEC(T64, ZSTD(1)) AFTER withheld;
