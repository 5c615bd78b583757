"""Reads an HTTP request's body and validates it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import orjson
from aiohttp import hdrs, web

from gateway.bodies.parsing import INLINE_BYTES_MAX, check_values
from gateway.server.body import read_body

_Parsed = TypeVar("_Parsed")
# Largest body in bytes that is tokenized before its request is counted in the limits. Tokenizing a
# larger body is costly, so its request is counted before.
_COUNTED_LATER_BYTES_MAX = 16 << 10
# The model that the path of a request names.
MODEL_OF_PATH = web.RequestKey("model", str)


async def read_parsed(request: web.Request, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """Return the result of `parse` on the body. Large bodies are parsed in a thread.

    The errors are the errors of `read_body` and of `parse`.
    """
    body = await read_body(request)
    if (model := request.get(MODEL_OF_PATH)) is not None:
        body = with_model(body, model)
    return parse(body) if len(body) <= INLINE_BYTES_MAX else await asyncio.to_thread(parse, body)


def takes_work(request: web.Request) -> bool:
    """Return whether a body is large or compressed, or does not declare its length."""
    length = request.content_length
    is_packed = hdrs.CONTENT_ENCODING in request.headers
    return length is None or length > _COUNTED_LATER_BYTES_MAX or is_packed


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with `model` added, unless it already names a model or is no JSON object."""
    if len(body) > INLINE_BYTES_MAX:
        check_values(body)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body  # the parser will refuse it
    if not isinstance(document, dict) or document.get("model") is not None:
        return body
    return orjson.dumps(document | {"model": model})
