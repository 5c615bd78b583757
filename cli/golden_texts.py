"""Decodes token ids of golden prompts and answers into text, by the gateway's /detokenize."""

import asyncio
from collections.abc import Iterable, Sequence

from cli.admin import setting_value
from cli.api import ApiClient, ApiError, Json

_REQUESTS_AT_ONCE = 8
_TEXT_MAX = 120  # characters of a text in a table

Tokens = tuple[int, ...]


class PoolTexts:
    """The decoded texts of token ids, by pool. A pool whose ids cannot be decoded is missing."""

    def __init__(self, texts: dict[tuple[str, Tokens], str]) -> None:
        """Use texts that are already decoded, by pool and token ids."""
        self._texts = texts

    def of(self, pool_id: str, tokens: Sequence[int] | None) -> str:
        """Return the quoted text of token ids, or the ids themselves if the text is unknown."""
        if tokens is None:
            return "-"
        text = self._texts.get((pool_id, tuple(tokens)))
        if text is None:
            return " ".join(map(str, tokens))
        return repr(text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}...")


async def decode(admin: ApiClient, wanted: Iterable[tuple[str, Sequence[int] | None]]) -> PoolTexts:
    """Return the texts of pools' token ids, as far as the gateway can decode them.

    Without OPENAI_BASE_URL and OPENAI_API_KEY no ids are decoded, and commands show the ids.

    Args:
        admin: Client of the admin REST, which lists the model of each pool.
        wanted: Pools, each with token ids.
    """
    url, key = setting_value("OPENAI_BASE_URL"), setting_value("OPENAI_API_KEY")
    if not (url and key):
        return PoolTexts({})
    asked = {(pool, tuple(ids)) for pool, ids in wanted if ids}
    model_of: dict[str, str] = {}
    for model in await admin.list("/v1/models"):
        if not model["owner_tenant_id"]:
            model_of.setdefault(model["pool_id"], model["id"])
    places = asyncio.Semaphore(_REQUESTS_AT_ONCE)
    found: dict[tuple[str, Tokens], str] = {}

    async def one(gateway: ApiClient, pool: str, ids: Tokens) -> None:
        async with places:
            try:
                body = {"model": model_of[pool], "tokens": list(ids)}
                found[pool, ids] = (await gateway.call("POST", "/detokenize", body))["prompt"]
            except (ApiError, KeyError):
                return  # commands show the ids instead

    async with ApiClient(url, key) as gateway:
        await asyncio.gather(*(one(gateway, *name) for name in asked))
    return PoolTexts(found)


def readable_result(result: Json, texts: PoolTexts) -> Json:
    """Return a result of a golden prompt with texts instead of token ids."""
    pool = result["pool_id"]
    right = texts.of(pool, result["right"])
    return result | {
        "answer": result["error"] or texts.of(pool, result["token_ids"]),
        "right": "same" if result["right"] == result["token_ids"] else right,
    }


def readable_quarantine(found: Json, texts: PoolTexts) -> Json:
    """Return a quarantine with one field per line, and texts instead of token ids."""
    pool, evidence = found["pool_id"], found["evidence"]
    lines = {name: value for name, value in found.items() if name != "evidence"}
    if not evidence:
        return lines
    lines |= {
        "prompt": texts.of(pool, evidence["prompt"]),
        "right": texts.of(pool, evidence["right"]["token_ids"]),
    }
    for number, answer in enumerate(evidence["answers"], start=1):
        differs = answer["differs_in"] or "right"
        lines[f"answer {number}"] = f"{differs}: {texts.of(pool, answer['token_ids'])}"
    return lines


def token_ids_of(found: Json) -> list[tuple[str, Sequence[int] | None]]:
    """Return all token ids of a quarantine, each list with the pool."""
    pool, evidence = found["pool_id"], found["evidence"]
    if not evidence:
        return []
    answers = [answer["token_ids"] for answer in evidence["answers"]]
    return [(pool, ids) for ids in (evidence["prompt"], evidence["right"]["token_ids"], *answers)]
