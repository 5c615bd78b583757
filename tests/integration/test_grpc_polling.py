"""Who reads gRPC's sockets, seen in the threads of fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

MESSAGES = 500
SERVE = f"""
import asyncio
import re
from pathlib import Path
import grpc.aio

def switches():
    tasks = list(Path("/proc/self/task").iterdir())
    pool = [task for task in tasks if (task / "comm").read_text().startswith("event_engine")]
    found = [re.search(r"^voluntary.*?(\\d+)$", (task / "status").read_text(), re.M) for task in pool]
    return sum(int(match[1]) for match in found)

async def echo(_, context):
    while isinstance(data := await context.read(), bytes):
        await context.write(data)

async def main() -> None:
    server = grpc.aio.server()
    handlers = {{"Echo": grpc.stream_stream_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        call = channel.stream_stream("/a.B/Echo")()
        for _ in range({MESSAGES}):
            await call.write(b"x")
            await call.read()
        await call.done_writing()
        print(switches())
    await server.stop(0)

asyncio.run(main())
"""
CALL = ("from sluice.grpc_polling import poll_in_place", "poll_in_place()")


def pool_switches(*lines: str, **env: str) -> int:
    """Run the lines, then echo messages; return how often threads of gRPC's pool were woken."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join((*lines, SERVE))],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd()), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


def test_no_pool_of_threads_stands_between_sockets_and_the_loop() -> None:
    assert pool_switches() > MESSAGES
    assert pool_switches(*CALL) < MESSAGES / 5


def test_the_environment_has_the_last_word() -> None:
    assert pool_switches(*CALL, GRPC_EXPERIMENTS="event_engine_client") > MESSAGES


def test_too_late_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        pool_switches("import grpc", *CALL)
