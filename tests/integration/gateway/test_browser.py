"""A page in Chromium calls the API from another origin: what browsers make of our CORS headers."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from sluice.process import free_port

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
TOLD_S = 60

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt-get install chromium"),
]
_PAGE = """<!doctype html><script>
const call = body => fetch("%s/v1/chat/completions", {
  method: "POST",
  headers: {
    "authorization": "Bearer sk-one", "content-type": "application/json",
    "x-stainless-os": "Unknown",
  },
  body: JSON.stringify({messages: [{role: "user", content: "hello"}], max_tokens: 2, ...body}),
});
(async () => {
  const told = {};
  try {
    const whole = await call({model: "tiny"});
    told.request_id = whole.headers.get("x-request-id");
    told.tokens = (await whole.json()).usage.completion_tokens;
    const streamed = await (await call({model: "tiny", stream: true})).text();
    told.done = streamed.trimEnd().endsWith("data: [DONE]");
    const refused = await call({model: "none"});
    told.refused = [refused.status, (await refused.json()).error.code];
  } catch (error) {
    told.error = String(error);
  }
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
})();
</script>"""


class Page:
    """A page on a port of the loopback: two origins, by address and by name."""

    def __init__(self) -> None:
        self.port = free_port()
        self.api = ""
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.router.add_get("/", self._show)
        app.router.add_post("/told", self._listen)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield
        finally:
            await runner.cleanup()

    async def opened(self, host: str, profile: Path) -> dict[str, Any]:
        """Open the page in a browser of its own, and return what its script tells."""
        assert BROWSER is not None
        browser = await asyncio.create_subprocess_exec(
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", f"--user-data-dir={profile}"),
            f"http://{host}:{self.port}/",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TOLD_S):
                return await self._told.get()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
            await browser.wait()

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=_PAGE % self.api, content_type="text/html")

    async def _listen(self, request: web.Request) -> web.Response:
        self._told.put_nowait(orjson.loads(await request.read()))
        return web.Response()


async def test_a_page_of_an_allowed_origin_chats_and_others_cannot(world, tmp_path: Path) -> None:
    page = Page()
    async with (
        page.serve(),
        world(cors_origins=f"http://127.0.0.1:{page.port}") as w,
    ):
        page.api = f"http://127.0.0.1:{w.gateway.settings.port}"
        told = await page.opened("127.0.0.1", tmp_path / "allowed")
        assert told.pop("request_id"), told
        assert told == {"tokens": 2, "done": True, "refused": [404, "model_not_found"]}
        foreign = await page.opened("localhost", tmp_path / "foreign")
        assert foreign == {"error": "TypeError: Failed to fetch"}


async def test_without_the_setting_no_page_can(world, tmp_path: Path) -> None:
    page = Page()
    async with page.serve(), world() as w:
        page.api = f"http://127.0.0.1:{w.gateway.settings.port}"
        told = await page.opened("127.0.0.1", tmp_path / "profile")
        assert told == {"error": "TypeError: Failed to fetch"}
