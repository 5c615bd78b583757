"""The choice of a model by its expected cost, from features, qualities, prices and waits. Pure."""
