"""The choice of a model by expected cost: features, qualities, prices, waits. Pure."""
