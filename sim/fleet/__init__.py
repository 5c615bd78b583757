"""The simulation of a whole fleet over a day."""
