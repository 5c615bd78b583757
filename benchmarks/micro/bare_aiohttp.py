"""A server that streams answers with aiohttp and does nothing else, for `request_calls`.

Its CPU time per request is the share of aiohttp, the event loop and the kernel in a gateway's.
"""

import asyncio
import sys

import uvloop
from aiohttp import web

_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" hello"},"finish_reason":null}]}\n\n'
_END = b"data: [DONE]\n\n"


async def _answer(request: web.Request, step_s: float) -> web.StreamResponse:
    asked = await request.json()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for number in range(asked["max_tokens"]):
        await asyncio.sleep(step_s)
        is_last = number == asked["max_tokens"] - 1
        await response.write(_EVENT + _END if is_last else _EVENT)
    await response.write_eof()
    return response


async def _serve(port: int, step_s: float) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await _answer(request, step_s)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve on the port of the command line, with a token per step of so many seconds."""
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
