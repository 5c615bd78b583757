"""Several worker processes under one parent: replaced, frozen, killed and stopped under load."""

import asyncio
import json
import os
import resource
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import ValidationError

from gateway.server.checks import problems
from gateway.server.runner import bound_socket
from gateway.server.worker_link import HEARTBEAT_S
from gateway.settings import GatewaySettings
from sluice import shared_secret
from sluice.process import free_port
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

KEY = "sk-one"
WAIT_S = 60.0


def request(body: dict[str, object], *, connection: str = "close") -> bytes:
    content = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Connection: {connection}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return (head + content).encode()


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    finally:
        writer.close()


def long_plan(submit: wire.Submit) -> Plan:
    """As many tokens as were asked for."""
    outcome = wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
    return Plan([[300 + i % 7] for i in range(submit.output_tokens_max)], outcome)


def endless_when_200(submit: wire.Submit) -> Plan:
    plan = long_plan(submit)
    return Plan(plan.steps, None) if submit.output_tokens_max == 200 else plan


async def test_rolling_restarts_lose_nothing_and_retired_workers_serve_open_connections(
    world, fleets
) -> None:
    async with world() as w, fleets(w.settings) as fleet:
        await roll_twice_under_load(w, fleet)
        await retire_with_open_connections(w, fleet)


async def roll_twice_under_load(w, fleet) -> None:
    w.router.plan, w.router.step_s = long_plan, 0.02
    is_over = False
    counts = {"new": 0, "kept": 0, "streams": 0}

    async def hammer() -> None:
        while not is_over:
            answer = await exchange(fleet.port, request({"max_tokens": 2}))
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
            counts["new"] += 1
            await asyncio.sleep(0.02)  # the workers that start need the processor more

    async def hammer_kept() -> None:
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            while not is_over:
                answer = await http.get(
                    f"http://127.0.0.1:{fleet.port}/v1/models",
                    headers={"authorization": f"Bearer {KEY}"},
                )
                assert answer.status_code == 200
                counts["kept"] += 1
                await asyncio.sleep(0.02)

    async def stream() -> None:
        while not is_over:
            answer = await exchange(
                fleet.port, request({"max_tokens": 150, "stream": True, "ignore_eos": True})
            )
            assert answer.count(b'"content":') >= 150, answer[-300:]
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-300:]
            counts["streams"] += 1

    async with asyncio.TaskGroup() as tasks:
        for work in (hammer, hammer, hammer, hammer_kept, hammer_kept, *[stream] * 6):
            tasks.create_task(work())
        for generation in (1, 2):
            os.kill(fleet.parent.pid, signal.SIGHUP)
            await fleet.until_names({f"fleet-0.{generation}", f"fleet-1.{generation}"})
            assert (await fleet.ops("/readyz")).status_code == 200
        is_over = True
    assert min(counts.values()) > 5, counts
    page = (await fleet.ops("/metrics")).text
    assert 'gateway_worker_ends_total{reason="retired"} 4.0' in page
    assert 'gateway_workers{state="ready"} 2.0' in page


async def retire_with_open_connections(w, fleet) -> None:
    """Roll a third time, with streams and idle connections."""
    w.router.plan, w.router.step_s = endless_when_200, 0.01
    endless = request({"max_tokens": 200, "stream": True, "ignore_eos": True})
    short = request({"max_tokens": 2}, connection="keep-alive")
    streams = [await asyncio.open_connection("127.0.0.1", fleet.port) for _ in range(16)]
    for reader, writer in streams:  # so many that each worker has some
        writer.write(endless)
        await reader.readuntil(b'"content":')
    kept = [await asyncio.open_connection("127.0.0.1", fleet.port) for _ in range(4)]
    for reader, writer in kept:
        writer.write(short)
        answer = await reader.readuntil(b'"completion_tokens":2')
        assert b"Connection: close" not in answer
    os.kill(fleet.parent.pid, signal.SIGHUP)
    await fleet.until_names({"fleet-0.2", "fleet-1.2", "fleet-0.3", "fleet-1.3"})
    await asyncio.sleep(1.5)  # longer than the grace
    for reader, writer in kept:
        writer.write(short)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert b"HTTP/1.1 200 " in answer, answer
        assert b"Connection: close" in answer
        writer.close()
    for _, writer in streams:
        writer.close()
    await fleet.until_names({"fleet-0.3", "fleet-1.3"})


async def test_workers_are_replaced_when_they_die_or_freeze_and_end_with_their_parent(
    world, fleets
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3_000
    async with world() as w:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted // 2, before[1]))
            async with fleets(w.settings, connections_max=wanted, freeze_s=2.0) as fleet:
                may_open_as_many_files(fleet, wanted)
                await stand_still_and_go_on(fleet)
                await replace_dead_and_frozen(fleet)
                family = psutil.Process(fleet.parent.pid).children()
                assert len(family) == 2
                os.kill(fleet.parent.pid, signal.SIGKILL)
                async with asyncio.timeout(WAIT_S):
                    while any(p.is_running() and p.status() != "zombie" for p in family):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def may_open_as_many_files(fleet, wanted: int) -> None:
    """Parent and workers: its own are few, until many ask it for its health and hang."""
    for pid in (fleet.parent.pid, *fleet.workers):
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] > wanted


async def stand_still_and_go_on(fleet) -> None:
    """A parent that stood still, alone or with all of its machine, kills no worker."""
    workers = set(fleet.workers)
    for suspended in ([fleet.parent.pid], [fleet.parent.pid, *workers]):
        for pid in suspended:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.2)
        for pid in suspended:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(HEARTBEAT_S)
        await fleet.until_ready()
        assert set(fleet.workers) == workers
    assert "worker_frozen" not in fleet.log_file.read_text()


async def replace_dead_and_frozen(fleet) -> None:
    for number, reason in ((signal.SIGKILL, "ended"), (signal.SIGSTOP, "frozen")):
        before = set(fleet.workers)
        victim = min(before)
        os.kill(victim, number)

        async def is_replaced(victim: int = victim) -> bool:
            return victim not in fleet.workers and len(fleet.workers) == 2

        await fleet.until(is_replaced)
        await fleet.until_ready()
        for _ in range(8):
            answer = await exchange(fleet.port, request({"max_tokens": 2}))
            assert answer.startswith(b"HTTP/1.1 200 ")
        line = f'gateway_worker_ends_total{{reason="{reason}"}} 1.0'
        assert line in (await fleet.ops("/metrics")).text


async def test_sigterm_drains_and_tells_streams_that_last_too_long(world, fleets) -> None:
    async with (
        world() as w,
        fleets(w.settings, drain_s=6.0, unready_s=3.0, workers=1) as fleet,
    ):
        w.router.plan, w.router.step_s = endless_when_200, 0.01
        short = {"max_tokens": 100, "stream": True, "ignore_eos": True}
        endless = {"max_tokens": 200, "stream": True, "ignore_eos": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        writer.write(request({"max_tokens": 2}, connection="keep-alive"))
        await reader.readuntil(b'"completion_tokens":2')
        async with asyncio.TaskGroup() as tasks:
            done = tasks.create_task(exchange(fleet.port, request(short)))
            cut = tasks.create_task(exchange(fleet.port, request(endless)))
            await fleet.until(lambda: _holds(len(w.router.submits) >= 3))
            os.kill(fleet.parent.pid, signal.SIGTERM)

            async def is_unready() -> bool:
                return (await fleet.ops("/readyz")).status_code == 503

            await fleet.until(is_unready)
            assert (await fleet.ops("/healthz")).status_code == 200
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            late = await reader.read()  # to its end: the connection is closed
            assert b"HTTP/1.1 503 " in late
            assert b"Connection: close" in late
            writer.close()
        assert done.result().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"code":"draining"' in cut.result()
        assert b"[DONE]" not in cut.result()
        async with asyncio.timeout(WAIT_S):
            assert await fleet.parent.wait() == 0


async def _holds(value: bool) -> bool:
    return value


BAD_SETTINGS = {
    "state": ({"state_dir": "/proc/nowhere"}, "GATEWAY__STATE_DIR: "),
    "artifacts": ({"artifacts_dir": "/nowhere"}, "GATEWAY__ARTIFACTS_DIR: "),
    "half": ({"tls_cert": "/nowhere.pem"}, "GATEWAY__TLS_KEY: "),
    "unread": (
        {"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.pem"},
        "GATEWAY__TLS_CERT, GATEWAY__TLS_KEY: ",
    ),
    "many": ({"workers": 256}, "GATEWAY__WORKERS: "),
    "no room for a number": ({"workers": 2, "instance_id": "g" * 60}, "GATEWAY__INSTANCE_ID: "),
    "files": ({"connections_max": 100_000_000}, "GATEWAY__CONNECTIONS_MAX: "),
    "valkey": ({"valkey_url": "nonsense"}, "GATEWAY__VALKEY_URL: "),
    "valkey, a password cut in two": ({"valkey_url": "redis://:a/b@h:1"}, "GATEWAY__VALKEY_URL: "),
    "valkey, a password that begins like a port": (
        {"valkey_url": "redis://u:12/secret@h:1"},
        "GATEWAY__VALKEY_URL: ",
    ),
    "valkey, such a one with a #": (
        {"valkey_url": "redis://u:12#secret@h:1"},
        "GATEWAY__VALKEY_URL: ",
    ),
    "valkey, such a one with a ?": (
        {"valkey_url": "rediss://u:12?secret@h:1"},
        "GATEWAY__VALKEY_URL: ",
    ),
    "valkey, another database": ({"valkey_url": "redis://h:1/1"}, "GATEWAY__VALKEY_URL: "),
    "valkey, a port that is none": (
        {"valkey_url": "redis://u:1@h:secret"},
        "GATEWAY__VALKEY_URL: ",
    ),
}


def plain_settings(home: Path, address: str) -> dict[str, object]:
    return {
        "instance_id": "g",
        "http_address": address,
        "control_address": "127.0.0.1:1",
        "state_dir": home,
        "artifacts_dir": home,
        "valkey_url": "redis://127.0.0.1:1",
        "kafka_bootstrap": "127.0.0.1:1",
    }


@pytest.mark.parametrize(("changes", "expected"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_each_setting_that_cannot_work_is_named(changes, expected, tmp_path) -> None:
    good = plain_settings(tmp_path, f"127.0.0.1:{free_port()}")
    assert not list(problems(GatewaySettings(**good)))
    found = list(problems(GatewaySettings(**good | changes)))
    assert len(found) == 1
    assert found[0].startswith(expected)
    assert "secret" not in found[0]


@pytest.mark.parametrize("end", ["", "/", "/0"])
def test_the_database_that_is_used_may_be_named(end, tmp_path) -> None:
    given = plain_settings(tmp_path, f"127.0.0.1:{free_port()}")
    assert not list(problems(GatewaySettings(**given | {"valkey_url": f"redis://:p@h:1{end}"})))


def test_one_address_for_both_is_found_at_the_start(tmp_path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = GatewaySettings(**plain_settings(tmp_path, address), ops_address=address)
    assert [text.partition(":")[0] for text in problems(settings)] == ["GATEWAY__OPS_ADDRESS"]


@pytest.mark.parametrize(
    "address", ["localhost", "h:x", "h:0", "h:65536", "http://h:80", ":80", "::1:80"]
)
def test_a_bad_address_is_answered_with_the_form_of_a_good_one(address, tmp_path) -> None:
    with pytest.raises(ValidationError, match="want host:port"):
        GatewaySettings(**plain_settings(tmp_path, address))


async def test_the_address_may_be_of_ipv6(world) -> None:
    addresses = Path("/proc/net/if_inet6")
    if not addresses.is_file() or f"{1:032x}" not in addresses.read_text():
        pytest.skip("this machine has no loopback of IPv6")
    address = f"[::1]:{free_port()}"
    async with world(http_address=address), httpx.AsyncClient() as http:
        assert (await http.get(f"http://{address}/readyz")).status_code == 200


BROKERS = "want host:port,"


@pytest.mark.parametrize(
    "brokers",
    ["", "no sense", "h:0", "h:1;i:2", "h:1 i:2", " , ", "h:x", ":1", "http:/h:1", "[::1"],
)
def test_bad_brokers_are_answered_with_the_form_of_good_ones(brokers: str, tmp_path) -> None:
    given = plain_settings(tmp_path, "127.0.0.1:8000") | {"kafka_bootstrap": brokers}
    with pytest.raises(ValidationError, match=BROKERS):
        GatewaySettings(**given)


@pytest.mark.parametrize(
    "brokers",
    [
        "h", "h:1", "h.x:1, 10.0.0.1:9092", "h:1,", ",h:1,, i:2 , ", "::1", "[::1]:1",
        "[fe80::1%eth0]:9092", "fe80::1%eth0", "SSL://h_1:9093", "SASL_SSL://h:1/,ssl://i/x",
    ],
)  # fmt: skip
def test_brokers_are_named_as_their_client_wants_them(brokers: str, tmp_path) -> None:
    given = plain_settings(tmp_path, "127.0.0.1:8000") | {"kafka_bootstrap": brokers}
    assert GatewaySettings(**given).kafka_bootstrap == brokers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SECURITY_PROTOCOL": "tls"}, "KAFKA__SECURITY_PROTOCOL: "),
        ({"SECURITY_PROTOCOL": "ssl", "SSL_CA_LOCATION": "/nowhere"}, "KAFKA__*: ssl.ca.location "),
        (
            {"SECURITY_PROTOCOL": "sasl_plaintext", "SASL_MECHANISM": "PLAIN"},
            "KAFKA__*: sasl.username ",
        ),
    ],
    ids=str,
)
def test_how_brokers_are_spoken_to_is_looked_at_before_workers_start(
    given, expected, tmp_path, monkeypatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"KAFKA__{name}", value)
    settings = GatewaySettings(**plain_settings(tmp_path, f"127.0.0.1:{free_port()}"))
    [found] = problems(settings)
    assert found.startswith(expected)


async def test_a_start_that_cannot_work_ends_with_one_line_and_status_2(tmp_path) -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen(1)
        given = plain_settings(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
        names = {f"GATEWAY__{name.upper()}": str(value) for name, value in given.items()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway",
            env={"PATH": "/usr/bin:/bin", **shared_secret.environment()} | names, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(WAIT_S):
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 2
    assert said.decode().startswith("GATEWAY__HTTP_ADDRESS: cannot listen on")
    assert len(said.decode().splitlines()) == 1, said
