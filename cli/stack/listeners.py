"""Lists each socket on which a local stack listens, with its callers and their secret.

`docs/security.md` contains the list. An end-to-end test compares the list with the open sockets.
"""

from dataclasses import dataclass
from enum import StrEnum


class Secret(StrEnum):
    """The proof by which a caller is accepted."""

    TOKEN = "digest of the installation's secret"  # noqa: S105 - the name of a class
    TENANT_KEY = "API key of a tenant"
    ADMIN_KEY = "admin key"
    PASSWORD = "password of the stack"  # noqa: S105 - likewise
    TICKET = "ticket of the control plane"
    ACCOUNT = "the kernel's word for the user"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StackListener:
    """A socket on which a process listens.

    Attributes:
        process: Name of the process, as in `sluice status`.
        name: Name of the port in ports.json, or else its purpose.
        protocol: Protocol on the socket.
        callers: Processes and people that are permitted to call.
        secret: Secret that proves a caller.
        stranger: Answer to callers without the secret.
    """

    process: str
    name: str
    protocol: str
    callers: str
    secret: Secret
    stranger: str


_PROBES = "probes, control plane, Prometheus"
_OPEN = "metrics and health, no key and no text of a request"
_UNAUTHENTICATED = "UNAUTHENTICATED"
_UNAUTHORIZED = "401"

LISTENERS = (
    StackListener("gateway", "public", "HTTP", "clients", Secret.TENANT_KEY, _UNAUTHORIZED),
    StackListener("gateway", "gateway_ops", "HTTP", _PROBES, Secret.NONE, _OPEN),
    StackListener(
        "router",
        "router_grpc",
        "gRPC",
        "gateways, routers, control plane, operators",
        Secret.TOKEN,
        _UNAUTHENTICATED,
    ),
    StackListener("router", "router_http", "HTTP", _PROBES, Secret.NONE, _OPEN),
    StackListener(
        "control-plane",
        "control_grpc",
        "gRPC",
        "gateways, routers, agents, telemetry",
        Secret.TOKEN,
        _UNAUTHENTICATED,
    ),
    StackListener(
        "control-plane", "admin", "HTTP", "operators, publishers", Secret.ADMIN_KEY, _UNAUTHORIZED
    ),
    StackListener(
        "telemetry",
        "telemetry_http",
        "HTTP",
        "operators, control plane",
        Secret.ADMIN_KEY,
        _UNAUTHORIZED,
    ),
    StackListener("agent", "agent_http", "HTTP", _PROBES, Secret.NONE, _OPEN),
    StackListener("agent", "chunks", "HTTP", "agents of other nodes", Secret.TICKET, "403"),
    StackListener(
        "triton", "inference", "gRPC", "routers, gateways, the agent", Secret.TOKEN, "UNAVAILABLE"
    ),
    StackListener(
        "triton", "metrics", "HTTP", "the agent, which passes them on", Secret.NONE, _OPEN
    ),
    StackListener("valkey", "valkey", "RESP", "gateways", Secret.PASSWORD, "NOAUTH"),
    StackListener("tracestore", "tracestore", "HTTP", "telemetry", Secret.PASSWORD, "403"),
    StackListener(
        "broker", "broker", "Kafka", "gateways, telemetry", Secret.PASSWORD, "connection closed"
    ),
    StackListener(
        "postgres", "postgres", "Unix socket", "control plane", Secret.ACCOUNT, "refused"
    ),
)
