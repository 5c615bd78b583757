-- Prompt tokens that routers placed on engines, beside the output tokens; `has_prompts` is false in
-- rows of older routers, which did not count them.
ALTER TABLE token_counts {{on_cluster}}
    ADD COLUMN IF NOT EXISTS has_prompts Bool AFTER discarded_tokens,
    ADD COLUMN IF NOT EXISTS prompt_tokens UInt64 AFTER has_prompts,
    ADD COLUMN IF NOT EXISTS uncertain_prompt_tokens UInt64 AFTER prompt_tokens,
    ADD COLUMN IF NOT EXISTS discarded_prompt_tokens UInt64 AFTER uncertain_prompt_tokens,
    ADD COLUMN IF NOT EXISTS resumed_prompt_tokens UInt64 AFTER discarded_prompt_tokens;

-- What a model had used when another one stood in for it (nobody's use, but engines made it),
-- and which limits a request was measured by.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS lost_model LowCardinality(String) AFTER choices,
    ADD COLUMN IF NOT EXISTS lost_prompt_tokens UInt32 AFTER lost_model,
    ADD COLUMN IF NOT EXISTS lost_output_tokens UInt32 AFTER lost_prompt_tokens,
    ADD COLUMN IF NOT EXISTS limits LowCardinality(String) AFTER lost_output_tokens,
    ADD COLUMN IF NOT EXISTS reserved_tokens UInt32 AFTER limits,
    ADD COLUMN IF NOT EXISTS is_limited_locally Bool AFTER reserved_tokens;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS lost_model LowCardinality(String) AFTER choices,
    ADD COLUMN IF NOT EXISTS lost_prompt_tokens UInt32 AFTER lost_model,
    ADD COLUMN IF NOT EXISTS lost_output_tokens UInt32 AFTER lost_prompt_tokens,
    ADD COLUMN IF NOT EXISTS limits LowCardinality(String) AFTER lost_output_tokens,
    ADD COLUMN IF NOT EXISTS reserved_tokens UInt32 AFTER limits,
    ADD COLUMN IF NOT EXISTS is_limited_locally Bool AFTER reserved_tokens;
