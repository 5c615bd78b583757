import pytest

from sluice.identity import (
    CALLERS,
    CertificateRole,
    Identity,
    Service,
    allowed,
    identity_of,
    refusal,
)
from sluice.triton import messages
from sluice.wire.agent.v1 import agent_pb2
from sluice.wire.control.v1 import control_pb2
from sluice.wire.distribution.v1 import distribution_pb2
from sluice.wire.router.v1 import router_pb2

MAY = {
    (CertificateRole.GATEWAY, Service.ROUTER),
    (CertificateRole.ROUTER, Service.ROUTER),
    (CertificateRole.CONTROL_PLANE, Service.ROUTER),
    (CertificateRole.OPERATOR, Service.ROUTER),
    (CertificateRole.GATEWAY, Service.CONTROL),
    (CertificateRole.ROUTER, Service.CONTROL),
    (CertificateRole.AGENT, Service.CONTROL),
    (CertificateRole.TELEMETRY, Service.CONTROL),
    (CertificateRole.AGENT, Service.AGENTS),
    (CertificateRole.AGENT, Service.DISTRIBUTION),
    (CertificateRole.GATEWAY, Service.DISTRIBUTION),
    (CertificateRole.GATEWAY, Service.STATE),
    (CertificateRole.GATEWAY, Service.RECORDS),
    (CertificateRole.GATEWAY, Service.BATCHES),
    (CertificateRole.GATEWAY, Service.ENGINE),
    (CertificateRole.ROUTER, Service.ENGINE),
    (CertificateRole.AGENT, Service.ENGINE),
    (CertificateRole.AGENT, Service.CHUNKS),
    (CertificateRole.MONITORING, Service.METRICS),
    (CertificateRole.OPERATOR, Service.METRICS),
    (CertificateRole.CONTROL_PLANE, Service.METRICS),
}


def test_each_service_answers_exactly_these_roles():
    found = {
        (role, service)
        for role in CertificateRole
        for service in Service
        if allowed(Identity(frozenset({role})), service)
    }

    assert found == MAY


def test_every_grpc_service_of_ours_is_listed():
    modules = (agent_pb2, control_pb2, distribution_pb2, messages, router_pb2)
    defined = {
        service.full_name
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
    }

    assert defined <= set(CALLERS)


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("router",),
        ("router.sluice.internal.example",),
        ("x.router.sluice.internal",),
        ("*.sluice.internal",),
        ("router.other.internal",),
    ],
)
def test_only_whole_names_are_roles(names):
    assert identity_of(names, "sluice.internal").roles == frozenset()


def test_other_names_are_let_be_and_told():
    who = identity_of(("node-7.example", "agent.d", "engine.d"), "d")

    assert who.roles == {CertificateRole.AGENT, CertificateRole.ENGINE}
    assert str(who) == "node-7.example, agent.d, engine.d"


def test_no_role_may_call_an_unknown_service():
    assert not any(
        allowed(Identity(frozenset({role})), "grpc.health.v1.Health") for role in CertificateRole
    )


def test_a_refusal_names_the_caller_and_the_fix():
    text = refusal(identity_of(("telemetry.d",), "d"), Service.CHUNKS, "d")

    assert text == (
        "a certificate of telemetry.d may not call chunks; use one with the DNS name agent.d"
    )
    assert "a certificate of nobody may not" in refusal(Identity(), "grpc.health.v1.Health", "d")
