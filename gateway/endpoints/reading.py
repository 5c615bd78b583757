"""From an HTTP request to the validated body of it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from gateway.bodies.parsing import INLINE_BYTES_MAX
from gateway.server.body import read_body

_Parsed = TypeVar("_Parsed")


async def read_parsed(request: web.Request, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """Return what `parse` makes of the body; large bodies are parsed in a thread.

    Errors are those of `read_body` and of `parse`.
    """
    body = await read_body(request)
    return parse(body) if len(body) <= INLINE_BYTES_MAX else await asyncio.to_thread(parse, body)
