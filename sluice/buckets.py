"""The buckets of rollout histograms, which the trace store fills and the gates compare. Pure."""

from math import log2

# Buckets grow by the fourth root of two, 19 %. The last bucket contains all values from 2**24.
# Values are ms of TTFT (up to 4.6 h), microseconds of TPOT (up to 16 s), tokens (up to 16 million),
# or thousandths of nats.
BUCKETS_PER_OCTAVE = 4
BUCKETS = 24 * BUCKETS_PER_OCTAVE + 1


def bucket_of(value: float) -> int:
    """Return the bucket of a value in the histogram's unit. All values below 1 share the first."""
    return min(BUCKETS - 1, int(log2(value) * BUCKETS_PER_OCTAVE)) if value > 1 else 0


def sql_bucket_of(value: str) -> str:
    """Return the SQL of `bucket_of` for the trace store."""
    place = f"floor(log2(greatest({value}, 1)) * {BUCKETS_PER_OCTAVE})"
    return f"toUInt8(least({place}, {BUCKETS - 1}))"
