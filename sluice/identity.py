"""The roles that certificates prove, and the roles that may call each service. Pure.

The certificate of a process has one DNS name per role, `<role>.<domain>`. DNS names are used
instead of SPIFFE's URIs, because every TLS library can verify them. For example, gRPC, Triton,
aiohttp and Prometheus can require the name `router.sluice.internal` at any address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DOMAIN = "sluice.internal"


class CertificateRole(StrEnum):
    """The role of a certificate."""

    GATEWAY = "gateway"
    ROUTER = "router"
    CONTROL_PLANE = "control-plane"
    TELEMETRY = "telemetry"
    AGENT = "agent"
    ENGINE = "engine"
    MONITORING = "monitoring"
    OPERATOR = "operator"


class Service(StrEnum):
    """A service that accepts calls. For gRPC services, the value is the full name."""

    ROUTER = "sluice.wire.router.v1.RouterService"
    CONTROL = "sluice.wire.control.v1.ControlService"
    AGENTS = "sluice.wire.agent.v1.AgentService"
    DISTRIBUTION = "sluice.wire.distribution.v1.DistributionService"
    STATE = "sluice.wire.state.v1.StateService"
    RECORDS = "sluice.wire.state.v1.RecordService"
    BATCHES = "sluice.wire.state.v1.BatchService"
    ENGINE = "inference.GRPCInferenceService"
    CHUNKS = "chunks"
    METRICS = "metrics"


CALLERS: dict[Service, frozenset[CertificateRole]] = {
    # The control plane sends pings, and operators request explanations.
    Service.ROUTER: frozenset(
        {
            CertificateRole.GATEWAY,
            CertificateRole.ROUTER,
            CertificateRole.CONTROL_PLANE,
            CertificateRole.OPERATOR,
        }
    ),
    Service.CONTROL: frozenset(
        {
            CertificateRole.GATEWAY,
            CertificateRole.ROUTER,
            CertificateRole.AGENT,
            CertificateRole.TELEMETRY,
        }
    ),
    Service.AGENTS: frozenset({CertificateRole.AGENT}),
    Service.DISTRIBUTION: frozenset({CertificateRole.AGENT, CertificateRole.GATEWAY}),
    Service.STATE: frozenset({CertificateRole.GATEWAY}),
    Service.RECORDS: frozenset({CertificateRole.GATEWAY}),
    Service.BATCHES: frozenset({CertificateRole.GATEWAY}),
    # Gateways request embeddings, and agents send probes. Triton itself checks no roles, so the
    # permitted callers have their own CA.
    Service.ENGINE: frozenset(
        {CertificateRole.GATEWAY, CertificateRole.ROUTER, CertificateRole.AGENT}
    ),
    Service.CHUNKS: frozenset({CertificateRole.AGENT}),
    # In an installation without Prometheus, the control plane evaluates alert rules on metrics.
    Service.METRICS: frozenset(
        {CertificateRole.MONITORING, CertificateRole.OPERATOR, CertificateRole.CONTROL_PLANE}
    ),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a peer, which its certificate proves.

    Attributes:
        roles: Roles of the certificate. An agent's certificate also has the role of its engines.
        names: All DNS names of the certificate.
    """

    roles: frozenset[CertificateRole] = frozenset()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the names, for the log."""
        return ", ".join(self.names) or "nobody"


def server_name(role: CertificateRole, domain: str) -> str:
    """Return the DNS name in the certificates of a role."""
    return f"{role.value}.{domain}"


def identity_of(names: Iterable[str], domain: str) -> Identity:
    """Return the identity for a certificate's DNS names. Names of no role are ignored."""
    listed = tuple(names)
    known = {server_name(role, domain): role for role in CertificateRole}
    return Identity(frozenset(known[name] for name in listed if name in known), listed)


def allowed(identity: Identity, service: str) -> bool:
    """Return whether a peer may call a service. A service without an entry has no callers."""
    return service in CALLERS and not CALLERS[Service(service)].isdisjoint(identity.roles)


def refusal(identity: Identity, service: str, domain: str) -> str:
    """Return the reason for a refusal, and how to fix it."""
    callers = CALLERS[Service(service)] if service in CALLERS else frozenset[CertificateRole]()
    wanted = sorted(server_name(role, domain) for role in callers)
    return (
        f"a certificate of {identity} may not call {service}; use one with the DNS name"
        f" {' or '.join(wanted) or 'of a role that it answers'}"
    )
