-- What was asked for, where `model` is what answered: they differ when another model stood in, and
-- when the name was an alias or a release. Empty in rows of older gateways.
ALTER TABLE requests {{on_cluster}}
    ADD COLUMN IF NOT EXISTS requested_model LowCardinality(String) AFTER model;
