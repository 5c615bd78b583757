"""Scaling policies of one pool, simulated on curves of demand in a fluid model."""
