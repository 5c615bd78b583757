"""The chart, rendered by Helm 4: it is what kustomize gives, and values change what they name."""

import json
import os
import re
import runpy
from operator import itemgetter
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.support.helm import IS_THERE, RenderedChart, charts, merged, values_of
from tests.unit.deploy.manifests import (
    HOME,
    NEEDS_KUSTOMIZE,
    OVERLAYS,
    ROOT,
    Object,
    component,
    container,
    environment,
    name_of,
    of_kind,
    overlay,
    pod,
    rendered,
    workloads,
)
from tests.unit.deploy.processes import module_of, read_settings

pytestmark = pytest.mark.skipif(not IS_THERE, reason="no wheel of helm-python-sdk for this machine")

SWITCHES = {
    "mtls": {"enabled": True},
    "monitors": {"enabled": True},
    "nodeScaling": {"enabled": True},
}
COMPONENTS = ("prometheus-operator", "node-scaling", "mtls")
CHANGED: dict[str, Any] = {
    "image": {
        "registry": "registry.example/llm",
        "tag": "0.1.9",
        "pullPolicy": "Always",
        "pullSecrets": ["registry"],
    },
    "images": {"sluice-edge": {"newName": "edge", "newTag": "0.2.0"}},
    "backends": {"aws-region": "eu-central-1"},
    "secrets": {"database": "their-database"},
    "gateway": {"replicas": 7, "autoscaling": {"enabled": False}},
    "router": {
        "replicas": 5,
        "env": {"ROUTER__DRAIN_S": "300", "ROUTER__TPOT_S": "0.2"},
        "podAnnotations": {"example.org/team": "serving"},
        "nodeSelector": {"disk": "fast"},
        "resources": {"requests": {"cpu": "3", "memory": "2Gi"}, "limits": {"memory": "3Gi"}},
    },
    "pools": {
        "cpu": {"storage": {"size": "80Gi", "className": "local"}},
        "h200": {
            "engine": "trtllm",
            "replicas": 3,
            "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
            "storage": {"size": "1Ti"},
        },
    },
    "migrations": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "priorityClasses": {"create": False},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "api.example.org",
        "tlsSecret": "tls",
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an-unknown-word": ({"gateways": {}}, "gateways"),
    "an-unknown-word-below": ({"router": {"replica": 3}}, "replica"),
    "a-text-for-a-number": ({"router": {"replicas": "three"}}, "replicas"),
    "a-number-for-a-variable": ({"router": {"env": {"ROUTER__DRAIN_S": 300}}}, "ROUTER__DRAIN_S"),
    "no-quantity": ({"pools": {"cpu": {"storage": {"size": "50 GB"}}}}, "size"),
    "an-engine-that-is-none": ({"pools": {"cpu": {"engine": "vllm"}}}, "engine"),
    "a-pool-without-resources": (
        {"pools": {"gpu": {"engine": "trtllm", "replicas": 1, "storage": {"size": "1Ti"}}}},
        "resources",
    ),
    "brokers-without-a-port": ({"backends": {"kafka-bootstrap": "kafka"}}, "kafka-bootstrap"),
    "an-ingress-without-a-host": ({"ingress": {"enabled": True}}, "ingress.host"),
    "a-variable-of-a-secret": (
        {"controlPlane": {"env": {"CONTROL_PLANE__DATABASE_URL": "x"}}},
        "CONTROL_PLANE__DATABASE_URL",
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, RenderedChart]:
    """All renders that the tests read, of one process."""
    given = {name: values_of(name) for name in OVERLAYS}
    given["all"] = merged(values_of("gpu"), SWITCHES)
    given["changed"] = CHANGED
    given |= {name: values for name, (values, _) in REFUSED.items()}
    return dict(zip(given, charts(list(given.values())), strict=True))


def by_name(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    """Return the objects without what differs by intent: hashed names, checksums, Helm's hooks.

    The order of variables, too: `complete` looks at that.
    """
    known: dict[tuple[str, str], Object] = {}
    text = re.sub(r'"(backends|actuators|migrations)-[a-z0-9]{10}"', r'"\1"', json.dumps(objects))
    for it in json.loads(text):
        for metadata in (
            it["metadata"],
            it.get("spec", {}).get("template", {}).get("metadata", {}),
        ):
            notes = metadata.get("annotations", {})
            for key in [key for key in notes if key.startswith(("checksum/", "helm.sh/"))]:
                del notes[key]
            if not notes:
                metadata.pop("annotations", None)
        if "actuators.json" in it.get("data", {}):
            it["data"]["actuators.json"] = json.loads(it["data"]["actuators.json"])
        if it["kind"] in {"Deployment", "StatefulSet", "Job"}:
            container(it)["env"].sort(key=itemgetter("name"))
        assert (it["kind"], name_of(it)) not in known
        known[it["kind"], name_of(it)] = it
    return known


def complete(chart: RenderedChart) -> tuple[Object, ...]:
    """Return the objects; all variables are there, and after those of which they are made."""
    assert not chart.problem
    for it in workloads(chart.objects):
        assert environment(it, chart.objects)
    return chart.objects


def test_templates_equal_the_manifests() -> None:
    script = runpy.run_path(str(ROOT / "deploy" / "helm" / "generate.py"))
    assert script["DIGEST"].read_text() == script["digest"](), "run deploy/helm/generate.py"


# values-gpu.yaml: below, with all switches on.
@NEEDS_KUSTOMIZE
@pytest.mark.parametrize("name", ["small", "production"])
def test_the_chart_is_the_overlay_and_its_migrations(
    name: str, found: dict[str, RenderedChart]
) -> None:
    assert by_name(complete(found[name])) == by_name((*overlay(name), *rendered("migrations")))


@NEEDS_KUSTOMIZE
def test_switches_are_the_components(found: dict[str, RenderedChart], tmp_path: Path) -> None:
    def from_here(folder: str) -> str:
        return os.path.relpath(HOME.resolve() / folder, tmp_path.resolve())

    listed = {
        "namespace": "sluice",
        "resources": [from_here("overlays/gpu")],
        "components": [from_here(f"components/{it}") for it in COMPONENTS],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(listed))
    expected = by_name((*rendered(str(tmp_path)), *rendered("migrations")))
    assert by_name(complete(found["all"])) == expected


def test_values_change_their_target(found: dict[str, RenderedChart]) -> None:
    assert not found["changed"].problem
    objects = found["changed"].objects
    of = {name_of(it): it for it in workloads(objects)}
    assert {name: it["spec"]["replicas"] for name, it in of.items()} == {
        "gateway": 7,
        "router": 5,
        "control-plane": 3,
        "telemetry": 2,
        "cpu-node": 4,
        "embed-node": 2,
        "h200-node": 3,
    }
    images = {name: container(it)["image"] for name, it in of.items()}
    assert images["router"] == images["gateway"] == "registry.example/llm/edge:0.2.0"
    assert images["telemetry"] == "registry.example/llm/sluice:0.1.9"
    assert images["h200-node"] == "registry.example/llm/sluice-replica-gpu:0.1.9"
    for it in of.values():
        assert container(it)["imagePullPolicy"] == "Always"
        assert pod(it)["imagePullSecrets"] == [{"name": "registry"}]
    router = of["router"]
    assert environment(router, objects)["ROUTER__DRAIN_S"] == "300"
    assert environment(router, objects)["ROUTER__TPOT_S"] == "0.2"
    assert pod(router)["nodeSelector"] == {"disk": "fast"}
    assert container(router)["resources"] == CHANGED["router"]["resources"]
    notes = router["spec"]["template"]["metadata"]["annotations"]
    assert notes["example.org/team"] == "serving"
    url = next(it for it in container(of["control-plane"])["env"] if "DATABASE_URL" in it["name"])
    assert url["valueFrom"]["secretKeyRef"]["name"] == "their-database"
    claims = {
        name: it["spec"]["volumeClaimTemplates"][0]["spec"]
        for name, it in of.items()
        if component(it) == "replica"
    }
    assert claims["cpu-node"]["storageClassName"] == "local"
    assert claims["cpu-node"]["resources"]["requests"]["storage"] == "80Gi"
    assert "storageClassName" not in claims["h200-node"]
    (ingress,) = of_kind(objects, "Ingress")
    assert [it["host"] for it in ingress["spec"]["rules"]] == ["api.example.org"]
    assert ingress["spec"]["tls"] == [{"hosts": ["api.example.org"], "secretName": "tls"}]
    assert not of_kind(objects, "Job", "NetworkPolicy", "PriorityClass", "HorizontalPodAutoscaler")
    (backends,) = of_kind(objects, "ConfigMap")
    assert backends["data"]["aws-region"] == "eu-central-1"
    assert backends["data"]["kafka-bootstrap"].startswith("kafka-0.")


def test_a_new_address_makes_new_pods(found: dict[str, RenderedChart]) -> None:
    checksums = {
        it["spec"]["template"]["metadata"]["annotations"]["checksum/backends"]
        for name in ("production", "changed")
        for it in workloads(found[name].objects)
    }
    assert len(checksums) == 2


@pytest.mark.parametrize("name", ["changed", "all"])
def test_schemas_and_processes_accept_rendered_values(
    name: str, found: dict[str, RenderedChart], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = kubernetes_validate.utils.schema_contents
    known: dict[Any, Any] = {}

    def read_once(*given: Any) -> Any:
        if given not in known:
            known[given] = contents(*given)
        return known[given]

    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read_once)
    for it in found[name].objects:
        if not re.search(r"coreos\.com|cert-manager\.io", it["apiVersion"]):
            kubernetes_validate.validate(it, kubernetes_validate.latest_version(), strict=True)
    if name == "changed":
        for workload in workloads(found[name].objects):
            if component(workload) == "control-plane":
                continue  # its database is another Secret
            module = module_of(container(workload)["command"])
            read_settings(module, environment(workload, found[name].objects))


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_by_name(name: str, found: dict[str, RenderedChart]) -> None:
    assert REFUSED[name][1] in found[name].problem
    assert not found[name].objects


def test_the_notes_name_the_secrets(found: dict[str, RenderedChart]) -> None:
    for secret in ("sluice-admin", "sluice-objects-read", "sluice-operator"):
        assert secret in found["production"].notes
