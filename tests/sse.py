"""Streams of completions, read with little processor time: for crowds of clients in one process."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

_DATA = b"data: "


async def chunks(
    http: aiohttp.ClientSession, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of one streamed chat completion.

    An answer that is refused, reports an error or ends without `[DONE]` fails the test.

    Args:
        http: Its base URL is that of the API, its headers have the key.
        body: Of the request, but for `stream`.
    """
    async with http.post("chat/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            yield chunk
    raise AssertionError("the stream ended without [DONE]")


def session(base_url: str, key: str, timeout_s: float) -> aiohttp.ClientSession:
    """Return a session for `chunks`; `timeout_s` is of each stream, and there may be any number."""
    return aiohttp.ClientSession(
        base_url=f"{base_url.rstrip('/')}/",
        headers={"authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
    )
