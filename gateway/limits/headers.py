"""`x-ratelimit-*` as OpenAI's clients read them. Pure."""

from collections.abc import Sequence

from gateway.limits.buckets import MINUTE_MS, Scope, Verdict


def headers(scopes: Sequence[Scope], verdict: Verdict) -> dict[str, str]:
    """Return limit, rest and reset of requests and tokens: of each, the scope with least left."""
    found: dict[str, str] = {}
    limit = scopes[verdict.requests_scope].rpm
    if limit:
        left = verdict.requests_left
        found["x-ratelimit-limit-requests"] = str(limit)
        found["x-ratelimit-remaining-requests"] = str(int(left) if left > 0 else 0)
        found["x-ratelimit-reset-requests"] = duration((limit - left) * MINUTE_MS / limit)
    limit = scopes[verdict.tokens_scope].tpm
    if limit:
        left = verdict.tokens_left
        found["x-ratelimit-limit-tokens"] = str(limit)
        found["x-ratelimit-remaining-tokens"] = str(int(left) if left > 0 else 0)
        found["x-ratelimit-reset-tokens"] = duration((limit - left) * MINUTE_MS / limit)
    return found


def duration(ms: float) -> str:
    """Return a duration as OpenAI's headers write it: 120ms, 7.5s, 1m30s."""
    whole = round(ms) if ms > 0 else 0
    if whole < 1000:
        return f"{whole}ms"
    minutes, rest = divmod(round(whole / 100), 600)
    seconds = f"{rest / 10:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
