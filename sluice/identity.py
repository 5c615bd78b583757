"""Identities that certificates prove, and the callers of each service; pure.

A process' certificate carries a DNS name per role: `<role>.<domain>`. DNS names, not URIs as SPIFFE
has them, because every TLS library checks them in both directions: gRPC, Triton, aiohttp and
Prometheus can all be told to expect `router.sluice.internal` wherever they dial.
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
    """A service that listens; gRPC services by their full names."""

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
    # The control plane pings; operators ask for explanations.
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
    # Gateways have embeddings made; agents probe. Triton itself asks for no role: allowed callers
    # have a CA of their own.
    Service.ENGINE: frozenset(
        {CertificateRole.GATEWAY, CertificateRole.ROUTER, CertificateRole.AGENT}
    ),
    Service.CHUNKS: frozenset({CertificateRole.AGENT}),
    # Without a Prometheus, the control plane evaluates alert rules on them.
    Service.METRICS: frozenset(
        {CertificateRole.MONITORING, CertificateRole.OPERATOR, CertificateRole.CONTROL_PLANE}
    ),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a peer, by its certificate.

    Attributes:
        roles: Roles of the certificate; an agent's is also for its engines.
        names: All DNS names of the certificate.
    """

    roles: frozenset[CertificateRole] = frozenset()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the names, for the log."""
        return ", ".join(self.names) or "nobody"


def server_name(role: CertificateRole, domain: str) -> str:
    """Return the DNS name that certificates of a role carry."""
    return f"{role.value}.{domain}"


def identity_of(names: Iterable[str], domain: str) -> Identity:
    """Return the identity of a certificate with these DNS names; unknown names are ignored."""
    listed = tuple(names)
    known = {server_name(role, domain): role for role in CertificateRole}
    return Identity(frozenset(known[name] for name in listed if name in known), listed)


def allowed(identity: Identity, service: str) -> bool:
    """Return whether a peer may call a service; unlisted services allow none."""
    return service in CALLERS and not CALLERS[Service(service)].isdisjoint(identity.roles)


def refusal(identity: Identity, service: str, domain: str) -> str:
    """Return the reason of a refusal, and the fix."""
    callers = CALLERS[Service(service)] if service in CALLERS else frozenset[CertificateRole]()
    wanted = sorted(server_name(role, domain) for role in callers)
    return (
        f"a certificate of {identity} may not call {service}; use one with the DNS name"
        f" {' or '.join(wanted) or 'of a role that it answers'}"
    )
