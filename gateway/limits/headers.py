"""`x-ratelimit-*` headers in OpenAI's form. Pure."""

from collections.abc import Sequence

from gateway.limits.buckets import BucketScope
from gateway.limits.verdict import SHOWN, Verdict, rests

_NAMES = {
    kind: tuple(f"x-ratelimit-{what}-{kind.header}" for what in ("limit", "remaining", "reset"))
    for kind in SHOWN
}


def headers(scopes: Sequence[BucketScope], verdict: Verdict) -> dict[str, str]:
    """Return limit, rest and reset of each kind, from the scope with the lowest rest.

    The rest is the amount that remains. The reset is the time until the bucket is full again.
    """
    found: dict[str, str] = {}
    for kind, place, left in rests(verdict):
        limit = scopes[place].limits.get(kind.name)
        if limit:
            name, remaining, reset = _NAMES[kind]
            found[name] = str(limit)
            found[remaining] = str(int(left)) if left > 0 else "0"
            found[reset] = duration((limit - left) * kind.ms_each(limit))
    return found


def duration(ms: float) -> str:
    """Return a duration in the form of OpenAI's headers, such as 120ms, 7.5s or 1m30s."""
    if ms < 999.5:
        return f"{ms:.0f}ms" if ms > 0 else "0ms"
    minutes, rest = divmod(round(ms / 100), 600)
    seconds = f"{rest / 10:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
