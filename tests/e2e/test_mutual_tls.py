"""Mutual TLS in a whole stack: who gets an answer at each port that our processes listen on."""

import asyncio
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from cli.certificates import BUNDLE, create
from cli.stack.home import Home, stored_secret
from sluice import shared_secret
from sluice.channels import _metadata
from sluice.process import marked_processes
from sluice.shared_secret import SharedSecret
from tests.e2e.conftest import Stack, started_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What has its own users, passwords and TLS; in this stack they are on the loopback without it.
BACKING = {"postgres", "valkey", "broker", "tracestore"}


class Kind(Enum):
    """How a port answers."""

    GRPC = "gRPC, only with the certificate of a caller's role"
    REST = "HTTPS; without a certificate probes and what has keys, metrics for monitoring alone"
    PUBLIC = "HTTPS for everybody; keys decide"
    CHUNKS = "HTTPS for agents"
    LOOPBACK = "plain HTTP on the loopback: Triton knows no TLS for its metrics"


@dataclass(frozen=True)
class Port:
    """A port that one of our processes listens on."""

    number: int
    kind: Kind
    role: str  # whose certificate it shows
    method: str = ""
    caller: str = ""  # who may call, and ...
    other: str = ""  # ... somebody of ours who may not


@pytest.fixture(scope="module")
def secure_stack() -> Iterator[Stack]:
    with started_stack("sim", "--no-embeddings", "--tls") as stack:
        ours = shared_secret.ours()
        shared_secret.install(SharedSecret([stored_secret(Home(stack.home))]))
        yield stack
        shared_secret.install(ours)


@pytest.fixture(scope="module")
def certificates(secure_stack) -> Path:
    return secure_stack.home / "certificates"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """What somebody else made by the same names."""
    folder = tmp_path_factory.mktemp("foreign")
    create(folder, days=2, hosts=["127.0.0.1"])
    return folder


def listening(stack: Stack) -> dict[str, set[int]]:
    """Return the ports of all processes of the stack, by the name of the process."""
    return {name: {port for _, port in places} for name, places in stack.listening().items()}


def known_ports(stack: Stack) -> dict[int, Port]:
    """Return what this test knows of; every port that listens must be here."""
    ports = stack.ports()
    engine = next(
        psutil.Process(pid)
        for pid in marked_processes(Home(stack.home.resolve()).marker)
        if psutil.Process(pid).name() == "tritonserver"
    )
    options = " ".join(engine.cmdline())
    grpc_port, metrics_port = (
        int((re.search(rf"--{name}-port=(\d+)", options) or ["", "0"])[1])
        for name in ("grpc", "metrics")
    )
    ours = listening(stack)
    chunks = ours["agent"] - {ports["agent_http"]}
    assert len(chunks) == 1, "one port for other nodes, one for probes"
    control, router = "/sluice.wire.control.v1.ControlService", "/sluice.wire.router.v1"
    found = [
        Port(ports["control_grpc"], Kind.GRPC, "control-plane", f"{control}/Leave", "router",
             "monitoring"),
        Port(ports["router_grpc"], Kind.GRPC, "router", f"{router}.RouterService/Ping",
             "control-plane", "telemetry"),
        Port(grpc_port, Kind.GRPC, "engine", "/inference.GRPCInferenceService/ServerLive",
             "router", "telemetry"),
        Port(metrics_port, Kind.LOOPBACK, ""),
        Port(chunks.pop(), Kind.CHUNKS, "agent", caller="agent", other="router"),
        Port(httpx.URL(stack.base_url).port or 0, Kind.PUBLIC, "gateway"),
        *(
            Port(port, Kind.REST, role, caller="monitoring", other="gateway")
            for role, port in (
                ("control-plane", httpx.URL(stack.admin_url).port or 0),
                ("telemetry", ports["telemetry_http"]),
                ("router", ports["router_http"]),
                ("gateway", ports["gateway_ops"]),
                ("agent", ports["agent_http"]),
            )
        ),
    ]  # fmt: skip
    return {port.number: port for port in found}


def context(ca: Path, own: Path | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts `ca`, and shows the certificate at `own` (.pem)."""
    made = ssl.create_default_context(cafile=str(ca / BUNDLE))
    if own is not None:
        made.load_cert_chain(own, own.with_name(f"{own.stem}-key.pem"))
    return made


def get(port: int, path: str, tls: ssl.SSLContext | None) -> int:
    """Return the status of a GET; 0 when the connection is refused, or ends without an answer."""
    link = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=tls)
    )
    try:
        link.request("GET", path)
        return link.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        link.close()


async def code(
    port: Port,
    ca: Path,
    own: Path | None,
    role: str = "",
    *,
    is_plain: bool = False,
    has_token: bool = True,
) -> grpc.StatusCode:
    """Return how a call of the port's method ends for a client with this certificate."""
    key = None if own is None else own.with_name(f"{own.stem}-key.pem").read_bytes()
    chain = None if own is None else own.read_bytes()
    shown = grpc.ssl_channel_credentials((ca / BUNDLE).read_bytes(), key, chain)
    name = ("grpc.ssl_target_name_override", f"{role or port.role}.sluice.internal")
    address = f"127.0.0.1:{port.number}"
    options = (name, ("grpc.use_local_subchannel_pool", 1))
    async with (
        grpc.aio.insecure_channel(address)
        if is_plain
        else grpc.aio.secure_channel(address, shown, options=options)
    ) as channel:
        metadata = _metadata(port.method) if has_token else ()
        call = channel.unary_unary(port.method, None, None)(b"", timeout=20, metadata=metadata)
        return await call.code()


def of(ports: dict[int, Port], kind: Kind) -> list[Port]:
    return [port for port in ports.values() if port.kind is kind]


async def test_every_port_of_ours_is_one_that_this_test_knows(secure_stack):
    ours = {
        port
        for name, ports in listening(secure_stack).items()
        if name not in BACKING
        for port in ports
    }
    assert ours == set(known_ports(secure_stack))


async def test_grpc_answers_callers_of_the_right_role_alone(secure_stack, certificates, foreign):
    refused = {grpc.StatusCode.UNAVAILABLE}
    for port in of(known_ports(secure_stack), Kind.GRPC):
        assert await code(port, certificates, certificates / f"{port.caller}.pem") in {
            grpc.StatusCode.OK,
            grpc.StatusCode.INVALID_ARGUMENT,  # an empty message, but it was let in
        }, port
        # Triton says so of what it restricts.
        own = certificates / f"{port.caller}.pem"
        assert await code(port, certificates, own, has_token=False) in {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.UNAVAILABLE,
        }, port
        assert await code(port, certificates, None) in refused, port
        assert await code(port, certificates, foreign / f"{port.caller}.pem") in refused, port
        assert await code(port, certificates, None, is_plain=True) in refused, port
        # Triton knows no roles: callers of engines have a CA of their own.
        wrong = await code(port, certificates, certificates / f"{port.other}.pem")
        expected = (
            grpc.StatusCode.UNAVAILABLE
            if port.role == "engine"
            else grpc.StatusCode.PERMISSION_DENIED
        )
        assert wrong is expected, port
        # And a server that is somebody else is refused by clients.
        assert await code(port, certificates, own, "telemetry") in refused, port


async def test_http_is_tls_and_asks_for_a_certificate_where_no_person_calls(
    secure_stack, certificates, foreign
):
    ports = known_ports(secure_stack)
    people = context(certificates)
    for port in of(ports, Kind.REST):
        stranger = context(certificates, foreign / f"{port.caller}.pem")
        right = context(certificates, certificates / f"{port.caller}.pem")
        wrong = context(certificates, certificates / f"{port.other}.pem")
        assert get(port.number, "/healthz", None) in {0, 400}, "not in plain text"
        assert get(port.number, "/healthz", people) == 200
        assert get(port.number, "/healthz", stranger) == 0
        assert [get(port.number, "/metrics", who) for who in (people, wrong, right)] == [
            403,
            403,
            200,
        ], port
    for port in of(ports, Kind.CHUNKS):
        path = f"/v1/artifacts/{'0' * 64}/chunks/0"
        assert get(port.number, path, None) in {0, 400}
        assert get(port.number, path, people) == 0
        assert get(port.number, path, context(certificates, foreign / "agent.pem")) == 0
        wrong = context(certificates, certificates / f"{port.other}.pem")
        assert get(port.number, path, wrong) == 403
        assert get(port.number, "/", context(certificates, certificates / "agent.pem")) == 404
    for port in of(ports, Kind.PUBLIC):
        assert get(port.number, "/healthz", None) in {0, 400}
        assert get(port.number, "/v1/models", people) == 401
    admin = httpx.URL(secure_stack.admin_url).port or 0
    assert get(admin, "/v1/tiers", people) == 401, "people show keys"


def streamed(stack: Stack, certificates: Path) -> str:
    """Return the events of a streamed answer."""
    body = {
        "model": "sluice-tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": 4,
    }
    headers = {"authorization": f"Bearer {stack.api_key}"}
    with httpx.Client(verify=context(certificates), timeout=60) as client:
        answer = client.post(f"{stack.base_url}/chat/completions", json=body, headers=headers)
    return answer.text


async def test_an_answer_streams_through_and_the_command_line_gets_along(
    secure_stack, certificates
):
    assert streamed(secure_stack, certificates).rstrip().endswith("data: [DONE]")
    shown = secure_stack.sluice("status", "--json")
    assert json.loads(shown.stdout)["is_healthy"], shown.stdout
    assert secure_stack.sluice("fleet", "replicas", "--json").returncode == 0
    top = secure_stack.sluice("top", "--once")
    assert top.returncode == 0, top.stderr


async def test_replaced_certificates_are_shown_to_new_connections_without_a_restart(
    secure_stack, certificates
):
    ports = [
        port
        for port in known_ports(secure_stack).values()
        # Triton reads its files at its start; see docs/security.md.
        if port.kind is not Kind.LOOPBACK and port.role != "engine"
    ]
    before = secure_stack.processes()
    create(certificates, days=3, hosts=["127.0.0.1", "localhost"])

    for port in ports:
        new = ssl.PEM_cert_to_DER_cert((certificates / f"{port.role}.pem").read_text())
        await until(lambda port=port, new=new: shown(port.number, certificates) == new)

    # Links that break are made again with what is there now.
    gone = psutil.Process(secure_stack.pid("router"))
    gone.kill()
    await until(lambda: secure_stack.pid("router") not in {0, gone.pid})
    await until(lambda: streamed(secure_stack, certificates).rstrip().endswith("data: [DONE]"))
    after = secure_stack.processes()
    same = {"gateway", "control-plane", "agent", "telemetry"}
    assert {after[name]["pid"] for name in same} == {before[name]["pid"] for name in same}


def shown(port: int, certificates: Path) -> bytes:
    """Return the certificate that a port shows to an agent."""
    tls = context(certificates, certificates / "agent.pem")
    tls.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        tls.wrap_socket(plain) as link,
    ):
        return link.getpeercert(binary_form=True) or b""


async def until(is_so: Callable[[], bool], timeout_s: float = 90) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        with suppress(OSError, httpx.HTTPError):
            if await asyncio.to_thread(is_so):
                return
        assert time.monotonic() < end_s, "it did not become so"
        await asyncio.sleep(0.2)
