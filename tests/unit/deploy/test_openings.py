"""Each port of compose and of a cluster is in the list of docs/security.md, with who reaches it."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from cli.stack.listeners import LISTENERS, Secret
from cli.stack.openings import COMPOSE, ENGINE_PORT, KUBERNETES, LOOPBACK, OPENINGS, Opening
from tests.unit.deploy.compose_file import PREFIXES, is_job, services
from tests.unit.deploy.manifests import (
    NEEDS_KUSTOMIZE,
    OVERLAYS,
    component,
    of_kind,
    overlay,
    pod,
    workloads,
)
from tests.unit.deploy.processes import port_of, read_settings
from tests.unit.deploy.test_kubernetes_policies import edges

SERVICES = services()
LISTED = {
    deployment: {(it.service, it.port): it for it in OPENINGS if it.deployment == deployment}
    for deployment in (COMPOSE, KUBERNETES)
}
_ADDRESSES = ("http_address", "grpc_address", "ops_address", "peer_address")
# What shows in a service of compose that callers must be known.
_PROOFS = {
    Secret.TOKEN: r"INSTALLATION__SECRET",
    Secret.TENANT_KEY: r"GATEWAY__|haproxy",
    Secret.ADMIN_KEY: r"ADMIN_KEY_SHA256",
    Secret.PASSWORD: r"PASSWORD|SECRET_ACCESS_KEY",
}


def published(service: dict[str, Any]) -> set[int]:
    """Return the ports of a container that the machine has, whatever its address."""
    return {int(it.rsplit(":", 1)[1]) for it in service.get("ports", [])}


def bound_by_ours(name: str) -> set[int]:
    """Return the ports that the settings of one of our processes name; engines' as ENGINE_PORT."""
    service = SERVICES[name]
    (module,) = [it for it in service["command"] if it in PREFIXES]
    settings = read_settings(module, service["environment"])
    found = {port_of(text) for it in _ADDRESSES if (text := getattr(settings, it, None))}
    # One that is on its own loopback is no opening: port 0 of nodes that serve no others.
    return (found - {0}) | ({ENGINE_PORT} if module == "replica.agent" else set())


def named_in_texts(name: str) -> set[int]:
    """Return the ports at which a service is called by others, by its health check and itself."""
    called = {
        int(port)
        for other in SERVICES.values()
        for port in re.findall(
            rf"(?<![\w.-]){name}:(\d+)", json.dumps({**other, "image": "", "build": ""})
        )
    }
    own = json.dumps([SERVICES[name].get(it) for it in ("healthcheck", "environment")])
    return called | {int(it) for it in re.findall(r"(?:127\.0\.0\.1|localhost|//):(\d+)", own)}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_port_of_compose_is_listed(name: str) -> None:
    service, is_ours = SERVICES[name], SERVICES[name].get("command", [""])[0] in PREFIXES
    listed = {port for known, port in LISTED[COMPOSE] if known == name}
    if is_job(service) or name == "targets":  # it writes a file
        assert (listed, published(service)) == (set(), set())
        return
    found = bound_by_ours(name) if is_ours else named_in_texts(name)
    assert listed, f"{name} is not in cli/stack/openings.py"
    assert (found | published(service)) <= listed, "add it to cli/stack/openings.py"
    if is_ours:
        assert listed == found


def test_each_port_of_compose_is_reached_by_its_listed_callers_alone() -> None:
    for it in LISTED[COMPOSE].values():
        service = SERVICES[it.service]
        reached = set(service["networks"])
        if it.port in published(service):
            assert all(text.startswith("127.0.0.1:") for text in service["ports"])
            reached.add(LOOPBACK)
        assert set(it.callers) == reached, it
        assert "network_mode" not in service


def test_each_listed_port_of_compose_has_its_secret() -> None:
    for it in LISTED[COMPOSE].values():
        if it.secret is not Secret.NONE:
            assert re.search(_PROOFS[it.secret], json.dumps(SERVICES[it.service])), it


@NEEDS_KUSTOMIZE
def test_each_port_of_a_cluster_admits_its_listed_callers_alone() -> None:
    declared: set[tuple[str, int]] = set()
    let_in: dict[tuple[str, int], set[str]] = {}
    for objects in map(overlay, OVERLAYS):
        for workload in workloads(objects):
            assert not pod(workload).get("hostNetwork")
            for one in (*pod(workload)["containers"], *pod(workload).get("initContainers", [])):
                for port in one.get("ports", []):
                    assert "hostPort" not in port
                    declared.add((component(workload), port["containerPort"]))
        for caller, called, port in edges(objects, "from"):
            let_in.setdefault((called, port), set()).add(caller)
    listed = LISTED[KUBERNETES]
    assert declared | {("replica", ENGINE_PORT)} == set(listed)
    assert let_in == {at: set(it.callers) for at, it in listed.items()}


@NEEDS_KUSTOMIZE
@pytest.mark.parametrize("name", OVERLAYS)
def test_no_service_of_a_cluster_is_open_to_the_outside(name: str) -> None:
    ports = {port for _, port in LISTED[KUBERNETES]}
    for service in of_kind(overlay(name), "Service"):
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
        assert {it["port"] for it in service["spec"]["ports"]} <= ports
    assert not of_kind(overlay(name), "Ingress", "Gateway", "HTTPRoute", "GRPCRoute")


@pytest.mark.parametrize("it", [it for it in OPENINGS if it.port != ENGINE_PORT], ids=str)
def test_a_socket_has_one_rule_wherever_it_is(it: Opening) -> None:
    same = [known for known in LISTENERS if known.name == it.purpose]
    assert all(known.secret is it.secret for known in same)
    assert (
        Counter((e.deployment, e.service, e.port) for e in OPENINGS)[
            it.deployment, it.service, it.port
        ]
        == 1
    )
