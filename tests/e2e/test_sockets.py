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
from sluice.procfs import program_name
from sluice.triton import messages
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


# Triton's routes, and how a process that speaks HTTP/1.1 or HTTP/2 is found among the ports.
_MODEL = "/v2/models/llm"
ROUTES = [
    *(("GET", f"/v2{path}") for path in ("", "/health/live", "/health/ready", "/models/stats")),
    *(("GET", _MODEL + path) for path in ("", "/ready", "/config", "/stats", "/trace/setting")),
    *(("POST", _MODEL + path) for path in ("/infer", "/generate", "/generate_stream")),
    *(("POST", _MODEL + path) for path in ("/versions/1/infer", "/trace/setting")),
    ("POST", "/v2/repository/index"),
    *(("POST", f"/v2/repository/models/llm/{verb}") for verb in ("load", "unload")),
    *(
        (method, f"/v2/{kind}sharedmemory{path}")
        for kind in ("system", "cuda")
        for method, path in (
            ("GET", "/status"),
            ("POST", "/region/r/register"),
            ("POST", "/region/r/unregister"),
            ("POST", "/unregister"),
        )
    ),
    *(
        (method, f"/v2/{name}")
        for name in ("logging", "trace/setting")
        for method in ("GET", "POST")
    ),
]
HTTP1 = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = b"\4"  # type of the first frame of an HTTP/2 server
SILENT_S = 2
HEALTH = "/grpc.health.v1.Health/Check"
NOT_SERVED = {"UNAUTHENTICATED", "UNIMPLEMENTED", "PERMISSION_DENIED"}
_loads = messages.RepositoryModelLoadRequest(model_name="own")
_loads.parameters["config"].string_param = '{"backend": "python"}'
_loads.parameters["file:1/model.py"].bytes_param = b"import os"
LOADS_CODE = _loads.SerializeToString()


def process_of(name: str) -> str:
    """Return the name in our list: of engines and of Triton's own process there may be several."""
    return "triton" if name.startswith("triton") else name


def _only_engine(stack: Stack) -> psutil.Process:
    """Return the one engine of the stack; another one, of a test before, may still be ending."""
    deadline_s = time.monotonic() + 60
    while True:
        pids = marked_processes(Home(stack.home.resolve()).marker)
        found = [pid for pid in pids if program_name(pid) == "tritonserver"]
        if len(found) == 1:
            return psutil.Process(found[0])
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


def first_bytes(port: int, sent: bytes) -> bytes:
    """Return how a socket begins its answer; empty: it closes, or is silent."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as link:
        link.settimeout(SILENT_S)
        try:
            link.sendall(sent)
            return link.recv(16)
        except OSError:
            return b""


@pytest.fixture(scope="module")
def listening(stack: Stack) -> set[int]:
    """Every port on which a process of the stack listens."""
    _only_engine(stack)
    return {port for places in stack.listening().values() for _, port in places}


def refused_call(channel: grpc.Channel, method: str, *, is_stream: bool) -> str:
    """Call without a secret; return the code of the refusal."""
    request = LOADS_CODE if method.endswith("RepositoryModelLoad") else b""
    try:
        if is_stream:
            # Only the end counts: gRPC may show a page of HTTP as an empty message before it.
            list(channel.stream_stream(method)(iter([request]), timeout=TIMEOUT_S))
        else:
            channel.unary_unary(method)(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code().name  # type: ignore[attr-defined]
    return "it answers"


def test_no_call_of_triton_is_answered_on_any_port(listening: set[int], ports: dict[str, int]):
    service = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    methods = {f"/{service.full_name}/{it.name}": it.client_streaming for it in service.methods}
    assert len(methods) >= 20
    called = {port for port in listening if first_bytes(port, HTTP2)[3:4] == SETTINGS}
    grpc_ports = {ports[it.name] for it in INET if it.protocol == "gRPC"}
    assert grpc_ports <= called, "each of them speaks HTTP/2"
    for port in sorted(called):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            found = {
                method: refused_call(channel, method, is_stream=is_stream)
                for method, is_stream in (methods | {HEALTH: False}).items()
            }
        allowed = {"UNAVAILABLE"} if port == ports["inference"] else NOT_SERVED
        assert set(found.values()) <= allowed, (port, found)


def test_no_route_of_triton_is_answered_on_any_port(listening: set[int], ports: dict[str, int]):
    asked = {port for port in listening if first_bytes(port, HTTP1).startswith(b"HTTP/1.")}
    assert {ports[it.name] for it in INET if it.protocol == "HTTP"} <= asked
    for port in sorted(asked):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            for method, path in ROUTES:
                body = None if method == "GET" else {}
                answer = client.request(method, path, json=body)
                is_refused = answer.status_code in {401, 403, 404, 405}
                # Triton's port of metrics answers a GET of any other path with nothing.
                is_empty = port == ports["metrics"] and method == "GET" and not answer.content
                assert is_refused or is_empty, (port, method, path, answer.text[:200])


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
