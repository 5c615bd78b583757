"""`redis+sentinel://`: when the primary dies, limits go on at the replica that Sentinel promotes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cli.stack.valkey import valkey_binary, valkey_spec
from gateway.directory import Principal
from gateway.limits.limiter import Limiter, LimitExceededError
from gateway.limits.valkey import ValkeyClient
from sluice.process import ChildProcess, ProcessSpec, free_port
from sluice.wire.control.v1 import control_pb2 as control
from tests.waiting import until

pytestmark = pytest.mark.real

SECRET = "test-secret_1"
CALLER = Principal(control.ApiKey(id="k"), control.Tenant(id="t"), control.Tier(rpm=10))


def server_spec(folder: Path, port: int, primary: int = 0) -> ProcessSpec:
    spec = valkey_spec(port, folder, folder.with_suffix(".log"), {}, password=SECRET)
    with (folder / "valkey.conf").open("a") as config:
        config.write(f"primaryauth {SECRET}\n")
        if primary:
            config.write(f"replicaof 127.0.0.1 {primary}\n")
    return spec


def sentinel_spec(folder: Path, port: int, primary: int) -> ProcessSpec:
    spec = replace(
        valkey_spec(port, folder, folder.with_suffix(".log"), {}),
        command=[str(valkey_binary()), str(folder / "sentinel.conf"), "--sentinel"],
        name="sentinel",
    )
    lines = (
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"requirepass {SECRET}",
        f"sentinel monitor limits 127.0.0.1 {primary} 1",
        f"sentinel auth-pass limits {SECRET}",
        "sentinel down-after-milliseconds limits 500",
        "sentinel failover-timeout limits 10000",
    )
    (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
    return spec


@pytest_asyncio.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[ChildProcess, int, int]]:
    """A primary, with a replica and a Sentinel: the primary, and ports of the others."""
    ports = [free_port() for _ in range(3)]
    async with AsyncExitStack() as stack:

        async def start(spec: ProcessSpec) -> ChildProcess:
            child = await ChildProcess.start(spec)
            stack.push_async_callback(child.stop)
            await child.wait_ready(60)
            return child

        primary = await start(server_spec(tmp_path / "one", ports[0]))
        await start(server_spec(tmp_path / "two", ports[1], ports[0]))
        async with Redis(port=ports[0], password=SECRET) as client:
            await until_synced(client)
        await start(sentinel_spec(tmp_path / "watch", ports[2], ports[0]))
        async with Redis(port=ports[2], password=SECRET) as client:
            await until_known(client)
        yield primary, ports[1], ports[2]


async def until_synced(client: Redis) -> None:
    async with asyncio.timeout(60):
        while not await client.wait(1, 100):  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)


async def until_known(client: Redis) -> None:
    """Wait until the Sentinel knows the replica, which it may promote then."""
    async with asyncio.timeout(60):
        while not await client.execute_command("SENTINEL", "REPLICAS", "limits"):  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)


async def granted(limiter: Limiter, times: int) -> int:
    """Return how many of so many requests are granted."""
    count = 0
    for _ in range(times):
        try:
            await limiter.reserve(
                CALLER, "m", prompt_tokens=0, output_tokens_max=0, is_bounded=True
            )
        except LimitExceededError:
            continue
        count += 1
    return count


async def test_limits_follow_the_primary(servers) -> None:
    async with await asyncio.get_running_loop().create_server(
        asyncio.Protocol, "127.0.0.1"
    ) as mute:
        await fail_over(*servers, mute.sockets[0].getsockname()[1])
    async with Redis(port=servers[2], password=SECRET) as direct:
        assert len(await direct.client_list()) == 1, "none is left open"


async def fail_over(primary: ChildProcess, replica: int, sentinel: int, mute: int) -> None:
    """Let the primary die, beside a Sentinel that takes connections and says nothing."""
    client = ValkeyClient(
        f"redis+sentinel://:{SECRET}@127.0.0.1:{mute},127.0.0.1:{sentinel}/limits", deadline_s=30.0
    )
    limiter = Limiter(client, local_share=0.1, clock=asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        await until(lambda: limiter.is_shared)
        assert await granted(limiter, 5) == 5
        async with Redis(port=primary_port(primary), password=SECRET) as direct:
            await until_synced(direct)
        os.kill(primary.pid, signal.SIGKILL)
        await until(lambda: not limiter.is_shared)
        assert await granted(limiter, 5) == 1, "its own share while there is no primary"
        await until(lambda: limiter.is_shared)
        assert await granted(limiter, 9) in {4, 5}, "the replica knows what was granted before"
        async with Redis(port=replica, password=SECRET) as direct:
            info = await direct.info("replication")
        assert info["role"] == "master"
        run.cancel()


def primary_port(child: ChildProcess) -> int:
    config = Path(child.spec.command[1]).read_text()
    return int(config.split("port ", 1)[1].split("\n", 1)[0])


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://127.0.0.1:1",
        "redis+sentinel://127.0.0.1:1/a/b",
        "redis://127.0.0.1:1,127.0.0.1:2",
        "redis+sentinel://:secret@h:x/limits",
    ],
)
def test_a_url_that_names_no_place_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="not a Valkey URL") as refused:
        ValkeyClient(url)
    assert ":secret@" not in str(refused.value)
