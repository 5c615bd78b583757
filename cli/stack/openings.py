"""Lists each port of `docker-compose.yml` and of the Kubernetes manifests with its callers.

`docs/security.md` contains the list. `tests/unit/deploy/test_openings.py` compares the list with
the ports that the Compose file and the manifests publish, listen on and admit.
"""

from dataclasses import dataclass
from itertools import starmap

from cli.stack.listeners import Secret

LOOPBACK = "loopback of the machine"
COMPOSE, KUBERNETES = "compose", "Kubernetes"
ENGINE_PORT = 0  # marks the ports of engines, which the agent chooses from the kernel's range


@dataclass(frozen=True, slots=True)
class Opening:
    """A port on which a process of a deployment listens.

    Attributes:
        deployment: COMPOSE or KUBERNETES.
        service: Service of compose, or component in a cluster.
        port: Port number, or ENGINE_PORT for the ports of engines.
        purpose: Name of the socket in `LISTENERS` if a platform process listens, else the program.
        secret: Secret that proves a caller.
        callers: Permitted callers. In compose, these are networks, and LOOPBACK for a published
            port. In a cluster, these are components and labels of namespaces in network policies.
    """

    deployment: str
    service: str
    port: int
    purpose: str
    secret: Secret
    callers: tuple[str, ...]

    @property
    def port_text(self) -> str:
        """The port as text for the table."""
        return "one per engine" if self.port == ENGINE_PORT else str(self.port)


_BACK = ("back",)
_BOTH = ("back", "edge")
_PUBLISHED = (LOOPBACK, *_BOTH)

_IN_COMPOSE = (
    ("gateway", 8000, "public", Secret.TENANT_KEY, _PUBLISHED),
    ("gateway", 9000, "gateway_ops", Secret.NONE, _BOTH),
    ("gateway-2", 8000, "public", Secret.TENANT_KEY, _BOTH),
    ("gateway-2", 9000, "gateway_ops", Secret.NONE, _BOTH),
    ("front", 8443, "public, by TLS", Secret.TENANT_KEY, _PUBLISHED),
    ("front", 8404, "health", Secret.NONE, _BOTH),
    ("router", 7001, "router_grpc", Secret.TOKEN, _BACK),
    ("router", 7080, "router_http", Secret.NONE, _BACK),
    ("router-2", 7001, "router_grpc", Secret.TOKEN, _BACK),
    ("router-2", 7080, "router_http", Secret.NONE, _BACK),
    ("control-plane", 7000, "control_grpc", Secret.TOKEN, _BOTH),
    ("control-plane", 8001, "admin", Secret.ADMIN_KEY, _PUBLISHED),
    ("telemetry", 8002, "telemetry_http", Secret.ADMIN_KEY, _PUBLISHED),
    ("replica-cpu", 7090, "agent_http", Secret.NONE, _BACK),
    ("replica-cpu", ENGINE_PORT, "inference", Secret.TOKEN, _BACK),
    ("replica-gpu", 7090, "agent_http", Secret.NONE, _BACK),
    ("replica-gpu", ENGINE_PORT, "inference", Secret.TOKEN, _BACK),
    ("postgres", 5432, "PostgreSQL", Secret.PASSWORD, _BACK),
    ("valkey", 6379, "Valkey", Secret.PASSWORD, _BACK),
    ("kafka", 9092, "Kafka; telemetry drops events without our digest", Secret.NONE, _BACK),
    ("kafka", 9093, "its controller", Secret.NONE, _BACK),
    ("clickhouse", 8123, "ClickHouse", Secret.PASSWORD, _BACK),
    ("objects", 8333, "S3", Secret.PASSWORD, _BACK),
    ("prometheus", 9090, "Prometheus: metrics and rules", Secret.NONE, _PUBLISHED),
    ("grafana", 3000, "Grafana", Secret.PASSWORD, _PUBLISHED),
)
_OPERATED = ("monitoring", "operators")
_IN_A_CLUSTER = (
    ("gateway", 8000, "public", Secret.TENANT_KEY, ("control-plane", "front")),
    ("gateway", 9100, "gateway_ops", Secret.NONE, ("monitoring",)),
    ("router", 7100, "router_grpc", Secret.TOKEN, ("control-plane", "gateway", "operators")),
    ("router", 7101, "router_http", Secret.NONE, ("monitoring",)),
    ("control-plane", 7000, "control_grpc", Secret.TOKEN, ("gateway", "replica", "router")),
    ("control-plane", 8001, "admin", Secret.ADMIN_KEY, (*_OPERATED, "replica", "telemetry")),
    ("telemetry", 8002, "telemetry_http", Secret.ADMIN_KEY, ("control-plane", *_OPERATED)),
    ("replica", 9200, "agent_http", Secret.NONE, ("monitoring",)),
    ("replica", 9201, "chunks", Secret.TICKET, ("replica",)),
    ("replica", ENGINE_PORT, "inference", Secret.TOKEN, ("gateway", "router")),
)


OPENINGS = tuple(
    starmap(
        Opening,
        [
            *((COMPOSE, *row) for row in _IN_COMPOSE),
            *((KUBERNETES, *row) for row in _IN_A_CLUSTER),
        ],
    )
)
