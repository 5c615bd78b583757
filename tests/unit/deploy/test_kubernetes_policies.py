"""Which ways the network policies of Kubernetes leave open."""

import re

from tests.unit.deploy.manifests import (
    EVERYWHERE,
    NEEDS_KUSTOMIZE,
    Object,
    component,
    environment,
    matches,
    name_of,
    of_kind,
    overlay,
    pod_labels,
    rendered,
    workloads,
)

pytestmark = NEEDS_KUSTOMIZE


def peers(rule: Object, side: str, known: list[Object]) -> set[str]:
    """Return the components, and the labels of namespaces, that a rule names."""
    found: set[str] = set()
    for peer in rule[side]:
        ((kind, selector),) = peer.items()
        if kind == "podSelector":
            found |= {component(it) for it in known if matches(selector, pod_labels(it))}
        else:
            found |= {label.removeprefix("sluice.dev/") for label in selector["matchLabels"]}
    return found


def edges(objects: tuple[Object, ...], side: str) -> set[tuple[str, str, int]]:
    """Return (from, to, port) of all policies of one side; engines' ports count as 0."""
    known = workloads(objects) + workloads(rendered("migrations"))
    found: set[tuple[str, str, int]] = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        own = {
            component(it) for it in known if matches(policy["spec"]["podSelector"], pod_labels(it))
        }
        for rule in policy["spec"].get("ingress" if side == "from" else "egress", []):
            for port in rule["ports"]:
                number = 0 if "endPort" in port else port["port"]
                for peer in peers(rule, side, known):
                    found |= {
                        (peer, it, number) if side == "from" else (it, peer, number) for it in own
                    }
    return found


# docs/architecture.md, `Processes`; 0 are the ports of engines.
EDGES = {
    ("gateway", "control-plane", 7000),
    ("router", "control-plane", 7000),
    ("replica", "control-plane", 7000),
    ("telemetry", "control-plane", 8001),
    ("control-plane", "telemetry", 8002),
    ("control-plane", "gateway", 8000),
    ("control-plane", "router", 7100),
    ("gateway", "router", 7100),
    ("router", "replica", 0),
    ("replica", "replica", 9201),
}
FROM_OUTSIDE = {
    ("front", "gateway", 8000),
    ("operators", "control-plane", 8001),
    ("operators", "telemetry", 8002),
    ("operators", "router", 7100),
    ("monitoring", "gateway", 9100),
    ("monitoring", "router", 7101),
    ("monitoring", "control-plane", 8001),
    ("monitoring", "telemetry", 8002),
    ("monitoring", "replica", 9200),
}
TO_OUTSIDE = {
    ("gateway", "backends", 6379),
    ("gateway", "backends", 9092),
    ("control-plane", "backends", 5432),
    ("control-plane", "backends", 8333),
    ("telemetry", "backends", 8123),
    ("telemetry", "backends", 9092),
    ("replica", "backends", 8333),
    ("migrations", "backends", 5432),
    ("migrations", "backends", 8123),
}


@EVERYWHERE
def test_policies_allow_the_edges_of_the_architecture_and_no_other(name: str) -> None:
    objects = overlay(name)
    inner = set(EDGES)
    if name != "small":
        inner |= {("gateway", "replica", 0), ("replica", "control-plane", 8001)}
    assert edges(objects, "from") == inner | FROM_OUTSIDE
    outward = edges(objects, "to")
    dns = {edge for edge in outward if edge[2] == 53}
    assert outward - dns == inner | TO_OUTSIDE
    assert {it for it, _, _ in dns} >= {component(it) for it in workloads(objects)}


@EVERYWHERE
def test_nothing_is_allowed_by_default_and_gateways_reach_engines_of_embeddings_alone(
    name: str,
) -> None:
    policies = {name_of(it): it["spec"] for it in of_kind(overlay(name), "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies.values():
        assert (
            set(policy["policyTypes"])
            == {
                {"ingress": "Ingress", "egress": "Egress"}[side]
                for side in policy
                if side in ("ingress", "egress")
            }
            or policy == policies["default-deny"]
        )
    reached = [
        it
        for it in workloads(overlay(name))
        if matches(policies["replica-embeddings"]["podSelector"], pod_labels(it))
    ]
    for it in reached:
        assert environment(it, overlay(name))["AGENT__ENGINES"] == "embed"


@EVERYWHERE
def test_policies_let_pods_reach_the_backends_of_the_overlay(name: str) -> None:
    for folder in (f"overlays/{name}", "migrations"):
        for config in of_kind(rendered(folder), "ConfigMap"):
            hosts = re.findall(r"([\w.-]+):\d+", " ".join(config["data"].values()))
            assert hosts
            # That is the namespace with the label sluice.dev/backends.
            assert all(host.endswith(".backends") for host in hosts), hosts
