-- Scores of answers in rollouts, in nats: rows that are copies, whose rollout is `scored_rollout_id`.
-- Empty and 0 in all other rows, and in those of older gateways.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS scored_rollout_id LowCardinality(String) AFTER is_repetitive,
    ADD COLUMN IF NOT EXISTS base_logprob Float32 AFTER scored_rollout_id,
    ADD COLUMN IF NOT EXISTS answer_logprob Float32 AFTER base_logprob,
    ADD COLUMN IF NOT EXISTS answer_entropy Float32 AFTER answer_logprob;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS scored_rollout_id LowCardinality(String) AFTER is_repetitive,
    ADD COLUMN IF NOT EXISTS base_logprob Float32 AFTER scored_rollout_id,
    ADD COLUMN IF NOT EXISTS answer_logprob Float32 AFTER base_logprob,
    ADD COLUMN IF NOT EXISTS answer_entropy Float32 AFTER answer_logprob;
