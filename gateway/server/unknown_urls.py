"""The error for a URL that no route answers, with the URL that was probably meant. Pure."""

import re
from collections.abc import Collection
from difflib import get_close_matches

_SHOWN_MAX = 120
_LIKENESS = 0.75
# URLs of OpenAI's and others' APIs that this server lacks, with an alternative for each.
_ELSEWHERE = {
    "/v1/assistants": "keep threads in the application, and use chat completions",
    "/v1/threads": "keep threads in the application, and use chat completions",
    "/v1/uploads": "prompts and documents go into the body of a request",
    "/v1/vector_stores": "keep embeddings of POST /v1/embeddings in a store of your own",
    "/v1/fine_tuning": "operators publish adapters by the administration's API",
    "/v1/images": "models here make text and embeddings",
    "/v1/audio": "models here make text and embeddings",
    "/v1/videos": "models here make text and embeddings",
    "/v1/realtime": "stream chat completions instead",
    "/v1/evals": "rollouts compare the answers of releases",
    "/v1/containers": "tools run in the application or on servers of the tenant's",
    "/v1/skills": "send instructions and tools with each request",
    "/v1/organization": "operators manage tenants, keys and usage by the administration's API",
    "/v1/completions/": "completions are not stored",
    "/v1/messages/batches": "POST /v1/batches takes chat completions and responses",
    "/v1/score": "POST /v1/rerank compares a query with documents",
}


def unknown_url(path: str, known: Collection[str]) -> str:
    """Return the message for a path.

    Args:
        path: Path from the client, decoded.
        known: All known paths. A path that ends in `/*` is a prefix.
    """
    text = f"Unknown request URL: {shown_path(path)}."
    tidy = re.sub(r"/{2,}", "/", path).rstrip("/") or "/"
    for candidate in (tidy, tidy.removeprefix("/v1"), tidy.replace("/v1/v1/", "/v1/", 1)):
        if candidate != path and _is_known(candidate, known):
            return f"{text} Did you mean {candidate}?"
    if _is_known(f"/v1{tidy}", known):
        return f"{text} Did you mean /v1{tidy}? The base URL of clients ends in /v1."
    for prefix, instead in _ELSEWHERE.items():
        if path == prefix or f"{tidy}/".startswith(f"{prefix.rstrip('/')}/"):
            return f"{text} {prefix.rstrip('/')} is not served here: {instead}."
    near = get_close_matches(tidy[:_SHOWN_MAX], known, n=1, cutoff=_LIKENESS)
    if near:
        return f"{text} Did you mean {near[0]}?"
    return f"{text} GET /openapi.json lists the endpoints of this server."


def shown_path(path: str) -> str:
    """Return a path for messages, shortened if it is long."""
    return path if len(path) <= _SHOWN_MAX else f"{path[:_SHOWN_MAX]}..."


def _is_known(path: str, known: Collection[str]) -> bool:
    if path in known:
        return not path.endswith("/*")
    return any(
        path.startswith(it[:-1]) and len(path) > len(it) - 1 for it in known if it.endswith("/*")
    )
