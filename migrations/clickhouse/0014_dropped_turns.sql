-- Oldest turns of a chat that had no room in the context.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS dropped_turns UInt32 AFTER unbilled_tokens;

ALTER TABLE closings {{on_cluster}}
    ADD COLUMN IF NOT EXISTS dropped_turns UInt32 AFTER unbilled_tokens;
