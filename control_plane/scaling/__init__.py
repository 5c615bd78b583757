"""Scaling decides the number of replicas of each pool, with its reasons, and applies the number."""
