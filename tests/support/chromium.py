"""A headless Chromium, driven over its DevTools protocol: opens pages, asks them, takes pictures."""

import asyncio
import base64
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
TOLD_S = 90.0
_EVERY_S = 0.05
_MESSAGE_BYTES_MAX = 64 << 20


class Chromium:
    """One page of one browser.

    Attributes:
        errors: What its console has told as an error, or an exception that nothing caught.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Prepare; `socket` speaks to the browser."""
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._session = ""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Read what the browser says, until it ends."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            found = message.json()
            if (waiting := self._answers.pop(found.get("id", 0), None)) is not None:
                waiting.set_result(found)
            else:
                self._note(found.get("method", ""), found.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("exception") or told))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in {"error", "assert"}:
            self.errors.append(str([it.get("value") for it in told["args"]]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return what the browser answers to a command."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        command: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        await self._socket.send_json(command)
        async with asyncio.timeout(TOLD_S):
            found = await self._answers[number]
        assert "error" not in found, (method, found["error"])
        return found["result"]

    async def attach(self) -> None:
        """Open an empty page and listen to its console."""
        target = await self.call("Target.createTarget", url="about:blank")
        where = {"targetId": target["targetId"], "flatten": True}
        self._session = (await self.call("Target.attachToTarget", **where))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Go to a page and wait until its document is there."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise; a thrown error fails."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, (expression[:200], found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(TOLD_S):
                while not await self.evaluate(f"Boolean({condition})"):  # noqa: ASYNC110
                    await asyncio.sleep(_EVERY_S)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"never: {condition}; the page says: {text}") from None

    async def picture(self, path: Path) -> None:
        """Write what is seen as a WebP."""
        found = await self.call("Page.captureScreenshot", format="webp", quality=60)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def opened_chromium(profile: Path, *, width: int, height: int) -> AsyncGenerator[Chromium]:
    """Start a browser of one's own, which ends with the context."""
    assert BROWSER is not None, "no chromium on PATH"
    process = await asyncio.create_subprocess_exec(
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        *(f"--window-size={width},{height}", "--hide-scrollbars", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = await _address(profile / "DevToolsActivePort")
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(address, max_msg_size=_MESSAGE_BYTES_MAX) as socket,
            asyncio.TaskGroup() as background,
        ):
            page = Chromium(socket)
            listening = background.create_task(page.listen())
            await page.attach()
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            yield page
            listening.cancel()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _address(file: Path) -> str:
    """Return where the browser listens, which it writes into its profile."""
    async with asyncio.timeout(TOLD_S):
        while not (file.exists() and file.read_text().count("\n")):  # noqa: ASYNC110 - another process
            await asyncio.sleep(_EVERY_S)
    port, path = file.read_text().split("\n")[:2]
    return f"ws://127.0.0.1:{port}{path}"
