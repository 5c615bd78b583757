"""`x-ratelimit-*` as OpenAI's clients read them. Pure."""

from collections.abc import Sequence

from gateway.limits.buckets import MINUTE_MS, Scope
from gateway.limits.script import RawVerdict


def headers(scopes: Sequence[Scope], verdict: RawVerdict) -> dict[str, str]:
    """Return limit, rest and reset of requests and tokens: of each, the scope with least left."""
    _, _, requests_at, tokens_at, _, requests_left, tokens_left = verdict
    found: dict[str, str] = {}
    limit = scopes[requests_at].rpm
    if limit:
        found["x-ratelimit-limit-requests"] = str(limit)
        found["x-ratelimit-remaining-requests"] = (
            str(int(requests_left)) if requests_left > 0 else "0"
        )
        found["x-ratelimit-reset-requests"] = duration((limit - requests_left) * MINUTE_MS / limit)
    limit = scopes[tokens_at].tpm
    if limit:
        found["x-ratelimit-limit-tokens"] = str(limit)
        found["x-ratelimit-remaining-tokens"] = str(int(tokens_left)) if tokens_left > 0 else "0"
        found["x-ratelimit-reset-tokens"] = duration((limit - tokens_left) * MINUTE_MS / limit)
    return found


def duration(ms: float) -> str:
    """Return a duration as OpenAI's headers write it: 120ms, 7.5s, 1m30s."""
    if ms < 999.5:
        return f"{ms:.0f}ms" if ms > 0 else "0ms"
    minutes, rest = divmod(round(ms / 100), 600)
    seconds = f"{rest / 10:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
