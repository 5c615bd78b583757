"""Scaling: how many replicas each pool needs, why, and what carries it out."""
