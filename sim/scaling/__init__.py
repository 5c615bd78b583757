"""Scaling policies of one pool, played on curves of demand in a fluid model."""
