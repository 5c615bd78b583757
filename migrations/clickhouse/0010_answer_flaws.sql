-- Flaws of the first answer, looked at in rollouts only; false in rows of older gateways.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS is_empty Bool AFTER is_refusal,
    ADD COLUMN IF NOT EXISTS is_repetitive Bool AFTER is_empty;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS is_empty Bool AFTER is_refusal,
    ADD COLUMN IF NOT EXISTS is_repetitive Bool AFTER is_empty;
