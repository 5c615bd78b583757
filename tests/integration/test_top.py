"""`sluice top` on a terminal and in a pipe, reading pages over HTTP."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

pytestmark = pytest.mark.real

_PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def page() -> AsyncIterator[str]:
    """URL of a page whose counter grows by ten at each look."""
    tokens = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal tokens
        tokens += 10
        lines = ("# TYPE llm_output_tokens_total counter", f"llm_output_tokens_total {tokens}")
        return web.Response(text="\n".join(lines) + "\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def command(url: str, *words: str) -> list[str]:
    options = [f"--metrics-url=p={url}", "--interval=0.2", *words]
    return [sys.executable, "-m", "cli", "top", *options]


async def test_in_a_pipe_one_picture_is_json(page: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        command(page, "--once", "--json"),
        capture_output=True,
        timeout=_PATIENCE_S,
        check=True,
    )
    [pool] = json.loads(done.stdout)["pools"]
    assert pool["name"] == "p"
    assert pool["output_tokens_per_s"] > 0
    assert pool["ready"] is None


async def test_nothing_to_read_is_one_line() -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        command("http://127.0.0.1:1", "--once"),
        capture_output=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == "sluice: http://127.0.0.1:1/metrics: ConnectError\n"


@pytest.mark.parametrize("key", [b"q", b"\x03"])
async def test_the_terminal_is_given_back_as_it_was(page: str, key: bytes) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 60))
    before = termios.tcgetattr(slave)
    # A session of its own, whose terminal this is: Ctrl-C is a signal only there.
    child = subprocess.Popen(  # noqa: ASYNC220
        ["setsid", "--ctty", *command(page)], stdin=slave, stdout=slave, stderr=slave
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            shown = b""
            while b"tokens/s" not in shown.partition(b"pool ")[2]:
                shown += await asyncio.to_thread(os.read, master, 4096)
            assert termios.tcgetattr(slave) != before
            os.write(master, key)
            while b"\x1b[?1049l" not in shown:
                shown += await asyncio.to_thread(os.read, master, 4096)
            assert await asyncio.to_thread(child.wait) == 0
        assert termios.tcgetattr(slave) == before
        assert shown.index(b"\x1b[?1049h") < shown.index(b"\x1b[?1049l")
        assert b"\x1b[?25h" in shown
        assert b"Traceback" not in shown
    finally:
        child.kill()
        child.wait()
        os.close(master)
        os.close(slave)
