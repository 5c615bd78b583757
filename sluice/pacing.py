"""Bounds of what a stream may wait for, so that several of its tokens leave in one write."""

# Between two writes of a stream: well below the time that it may be silent.
INTERVAL_MS_MAX = 5_000
# That pieces of reasoning and of calls wait for those behind them: too little to be noticed.
GATHER_MS_MAX = 50
