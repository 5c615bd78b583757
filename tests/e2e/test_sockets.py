"""What a stranger on the machine gets at each socket of a stack without TLS."""

import os
import socket
import subprocess
import time

import grpc
import httpx
import psutil
import pytest
from confluent_kafka import KafkaException, Producer

from cli.stack.broker import client_settings
from cli.stack.home import Home
from cli.stack.listeners import LISTENERS, Secret, StackListener
from cli.stack.postgres import locate
from sluice.kafka import KafkaSettings
from sluice.process import marked_processes
from tests.e2e.conftest import Stack

TIMEOUT_S = 20
UNIX = [it for it in LISTENERS if it.protocol == "Unix socket"]
INET = [it for it in LISTENERS if it not in UNIX]
METHODS = {
    "router_grpc": "/sluice.wire.router.v1.RouterService/Ping",
    "control_grpc": "/sluice.wire.control.v1.ControlService/Leave",
    "inference": "/inference.GRPCInferenceService/RepositoryIndex",
}
PATHS = {
    "public": "/v1/models",
    "admin": "/v1/tiers",
    "telemetry_http": "/v1/requests",
    "chunks": f"/v1/artifacts/{'0' * 64}/chunks/0",
    "tracestore": "/?query=SELECT%201",
}


def process_of(name: str) -> str:
    """Return the name in our list: of engines and of Triton's own process there may be several."""
    return "triton" if name.startswith("triton") else name


def _only_engine(stack: Stack) -> psutil.Process:
    """Return the one engine of the stack; another one, of a test before, may still be ending."""
    deadline_s = time.monotonic() + 60
    while True:
        pids = marked_processes(Home(stack.home.resolve()).marker)
        found = [it for it in map(psutil.Process, pids) if it.name() == "tritonserver"]
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)


@pytest.fixture(scope="module")
def ports(stack: Stack) -> dict[str, int]:
    """The port of each socket of the list."""
    known = stack.ports() | {
        "public": httpx.URL(stack.base_url).port or 0,
        "admin": httpx.URL(stack.admin_url).port or 0,
    }
    engine = _only_engine(stack)
    listening = {
        process_of(name): {port for _, port in places} for name, places in stack.listening().items()
    }
    options = dict(word.split("=", 1) for word in engine.cmdline() if "=" in word)
    known["inference"] = int(options["--grpc-port"])
    known["metrics"] = int(options["--metrics-port"])
    (known["chunks"],) = listening["agent"] - {known["agent_http"]}
    return known


def test_each_socket_is_in_the_list_and_on_the_loopback(stack: Stack, ports: dict[str, int]):
    wanted: dict[str, set[int]] = {}
    for it in INET:
        wanted.setdefault(it.process, set()).add(ports[it.name])
    found: dict[str, set[int]] = {}
    for name, places in stack.listening().items():
        assert {address for address, _ in places} <= {"127.0.0.1", "::ffff:127.0.0.1"}, name
        if places:
            found.setdefault(process_of(name), set()).update(port for _, port in places)
    assert found == wanted


@pytest.mark.parametrize("it", [it for it in INET if it.protocol == "gRPC"], ids=lambda it: it.name)
def test_grpc_answers_no_stranger(it: StackListener, ports: dict[str, int]):
    with grpc.insecure_channel(f"127.0.0.1:{ports[it.name]}") as channel:
        call = channel.unary_unary(METHODS[it.name], None, None)
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=TIMEOUT_S)
    assert refused.value.code().name == it.stranger  # type: ignore[attr-defined]


@pytest.mark.parametrize("it", [it for it in INET if it.name in PATHS], ids=lambda it: it.name)
def test_http_answers_no_stranger(it: StackListener, ports: dict[str, int]):
    answer = httpx.get(f"http://127.0.0.1:{ports[it.name]}{PATHS[it.name]}", timeout=TIMEOUT_S)
    assert str(answer.status_code) == it.stranger


def test_valkey_answers_no_stranger(ports: dict[str, int]):
    with socket.create_connection(("127.0.0.1", ports["valkey"]), TIMEOUT_S) as link:
        link.sendall(b"KEYS *\r\n")
        assert link.recv(100).startswith(b"-NOAUTH")


@pytest.mark.parametrize("stranger", [{}, client_settings("wrong")], ids=["no login", "password"])
def test_the_broker_answers_no_stranger(ports: dict[str, int], stranger: dict[str, str]):
    values = {name.removeprefix("KAFKA__").lower(): value for name, value in stranger.items()}
    options = KafkaSettings.model_validate(values).options()
    server = {"bootstrap.servers": f"127.0.0.1:{ports['broker']}", "log_level": 0}
    with pytest.raises(KafkaException):
        Producer({**server, **options}).list_topics(timeout=2)


OPEN = [it for it in INET if it.secret is Secret.NONE and it.protocol == "HTTP"]


@pytest.mark.parametrize("it", OPEN, ids=lambda it: it.name)
def test_open_ports_show_no_key(it: StackListener, stack: Stack, ports: dict[str, int]):
    text = httpx.get(f"http://127.0.0.1:{ports[it.name]}/metrics", timeout=TIMEOUT_S).text
    assert "# HELP" in text
    for secret in (stack.api_key, stack.admin_key):
        assert secret not in text
    refused = httpx.post(f"http://127.0.0.1:{ports[it.name]}/v2/repository/index", json={})
    assert refused.status_code in {404, 405}, "health and metrics, nothing else"


def test_engines_are_not_root(stack: Stack):
    """Where the agent is, and may mount; else it warns, and there is no other user to be had."""
    if os.geteuid() == 0:
        tried = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
        if tried.returncode:
            pytest.skip("root may not mount here (CAP_SYS_ADMIN)")
    found = [psutil.Process(pid) for pid in marked_processes(Home(stack.home.resolve()).marker)]
    engines = [it for it in found if it.name().startswith("triton")]
    assert len(engines) >= 2, "Triton and its stub"
    assert 0 not in {uid for it in engines for uid in (*it.uids(), *it.gids())}


def test_postgres_has_no_port_and_a_directory_closed_to_others(stack: Stack):
    (it,) = UNIX
    assert it.secret is Secret.ACCOUNT
    assert locate(stack.home).sockets.stat().st_mode & 0o007 == 0
