"""The model `auto`: which model answers, and which other one when that cannot."""
