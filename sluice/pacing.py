"""Longest delays of tokens in a stream, so that several tokens leave in one write."""

# Longest interval between two writes of a stream, well below the permitted silence of a stream.
INTERVAL_MS_MAX = 5_000
# Longest delay of reasoning and tool call tokens, too short to be noticed.
GATHER_MS_MAX = 50
