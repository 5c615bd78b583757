"""The manifests, rendered by kustomize as it is in kubectl, and read as their readers would."""

import json
import os
import re
import runpy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from replica.agent.settings import AgentSettings
from router.settings import Settings as RouterSettings
from tests.unit.deploy.processes import grace_s, module_of, port_of, read_settings

ROOT = Path(__file__).parents[3]
HOME = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("small", "production", "gpu")
ENGINE_PORTS = range(32768, 61000)

Object = dict[str, Any]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None and shutil.which("kustomize") is None,
    reason="neither kubectl nor kustomize is on PATH: manifests cannot be rendered",
)


@cache
def rendered(folder: str) -> tuple[Object, ...]:
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    done = subprocess.run(
        [*program, str(HOME / folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecated fields are told there
    return tuple(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> tuple[Object, ...]:
    return rendered(f"overlays/{name}")


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [it for it in objects if it["kind"] in kinds]


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    return of_kind(objects, "Deployment", "StatefulSet", "Job")


def name_of(it: Object) -> str:
    return it["metadata"]["name"]


def pod(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]


def pod_labels(workload: Object) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def container(workload: Object) -> Object:
    (only,) = pod(workload)["containers"]
    return only


def component(workload: Object) -> str:
    return pod_labels(workload)["app.kubernetes.io/component"]


def matches(selector: Object, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return wanted <= labels.items()


def secrets() -> dict[str, dict[str, str]]:
    given = SimpleNamespace(
        namespace="sluice",
        database_url="postgresql+asyncpg://u:p@db/sluice",
        valkey_url="redis://:p@valkey:6379",
        clickhouse_user="default",
        clickhouse_password="p",
        s3_access_key_id="a",
        s3_secret_access_key="b",
        s3_read_access_key_id="c",
        s3_read_secret_access_key="d",
        operator_key="sk-x",
    )
    manifests = runpy.run_path(str(HOME / "make_secrets.py"))["manifests"](given)
    return {it["metadata"]["name"]: it["stringData"] for it in manifests}


FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.1.2.3"}


def environment(workload: Object, objects: tuple[Object, ...]) -> dict[str, str]:
    """Resolve the variables as a kubelet would; AssertionError when something is nowhere."""
    maps = {name_of(it): it["data"] for it in of_kind(objects, "ConfigMap")}
    known = secrets()
    found: dict[str, str] = {}
    for entry in container(workload)["env"]:
        assert entry["name"] not in found, f"{entry['name']} is given twice"
        if "value" in entry:
            value = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], entry["value"])
        else:
            ((kind, ref),) = entry["valueFrom"].items()
            if kind == "fieldRef":
                value = FIELDS[ref["fieldPath"]]
            else:
                value = {"configMapKeyRef": maps, "secretKeyRef": known}[kind][ref["name"]][
                    ref["key"]
                ]
        found[entry["name"]] = value
    return found


EVERYWHERE = pytest.mark.parametrize("name", OVERLAYS)
FOLDERS = (*(f"overlays/{name}" for name in OVERLAYS), "migrations")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_schemas_of_kubernetes_have_nothing_against_them(folder: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the wheel kubernetes-validate has the schemas"
    )
    for it in rendered(folder):
        if "coreos.com" not in it["apiVersion"]:
            validate.validate(it, validate.latest_version(), strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_process_takes_its_settings(folder: str) -> None:
    for workload in workloads(rendered(folder)):
        module = module_of(container(workload)["command"])
        read_settings(module, environment(workload, rendered(folder)))


@EVERYWHERE
def test_ports_are_those_that_the_processes_listen_on(name: str) -> None:
    for workload in workloads(overlay(name)):
        settings = read_settings(
            module_of(container(workload)["command"]), environment(workload, overlay(name))
        )
        listening = {
            port_of(getattr(settings, field))
            for field in ("http_address", "grpc_address", "ops_address", "peer_address")
            if getattr(settings, field, None)
        }
        declared = {port["containerPort"] for port in container(workload)["ports"]}
        assert declared == listening, name_of(workload)
        assert not set(ENGINE_PORTS) & declared


@EVERYWHERE
def test_services_lead_to_pods_that_are_there(name: str) -> None:
    objects = overlay(name)
    for service in of_kind(objects, "Service"):
        (workload,) = [
            it
            for it in workloads(objects)
            if service["spec"]["selector"].items() <= pod_labels(it).items()
        ]
        ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] == name_of(service)


@EVERYWHERE
def test_addresses_name_services_and_their_ports(name: str) -> None:
    objects = overlay(name)
    offered = {
        f"{name_of(it)}:{port['port']}"
        for it in of_kind(objects, "Service")
        for port in it["spec"]["ports"]
    }
    for workload in workloads(objects):
        for variable, value in environment(workload, objects).items():
            if variable.endswith(
                ("CONTROL_ADDRESS", "TELEMETRY_URL", "CONTROL_PLANE_URL", "ADMIN_URL")
            ):
                assert value.removeprefix("http://") in offered, variable


@EVERYWHERE
def test_selectors_match_their_own_pods_alone(name: str) -> None:
    for workload in workloads(overlay(name)):
        selected = [
            other
            for other in workloads(overlay(name))
            if matches(workload["spec"]["selector"], pod_labels(other))
        ]
        assert selected == [workload]
        for spread in pod(workload)["topologySpreadConstraints"]:
            assert matches(spread["labelSelector"], pod_labels(workload))


@EVERYWHERE
def test_every_workload_has_one_disruption_budget(name: str) -> None:
    objects = overlay(name)
    for workload in workloads(objects):
        budgets = [
            it
            for it in of_kind(objects, "PodDisruptionBudget")
            if matches(it["spec"]["selector"], pod_labels(workload))
        ]
        assert len(budgets) == 1, name_of(workload)
        assert budgets[0]["spec"]["maxUnavailable"] == 1


@EVERYWHERE
def test_probes_ask_the_status_endpoints(name: str) -> None:
    for workload in workloads(overlay(name)):
        it = container(workload)
        ports = {port["name"] for port in it["ports"]}
        for probe, path in (
            ("startupProbe", "/healthz"),
            ("livenessProbe", "/healthz"),
            ("readinessProbe", "/readyz"),
        ):
            assert it[probe]["httpGet"]["path"] == path
            assert it[probe]["httpGet"]["port"] in ports
        startup = it["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


@EVERYWHERE
def test_pods_have_the_time_that_their_processes_take_to_end(name: str) -> None:
    objects = overlay(name)
    for workload in workloads(objects):
        settings = read_settings(
            module_of(container(workload)["command"]), environment(workload, objects)
        )
        needed = grace_s(settings)
        hook = container(workload).get("lifecycle", {}).get("preStop")
        if hook:
            needed += int(re.search(r"timeout (\d+)", hook["exec"]["command"][-1])[1])
            assert isinstance(settings, AgentSettings)
            assert int(settings.drain_timeout_s) + settings.start_timeout_s / 2 <= needed
        assert pod(workload)["terminationGracePeriodSeconds"] >= needed, name_of(workload)


@EVERYWHERE
def test_gateways_serve_until_the_front_has_noticed_and_outlast_routers(name: str) -> None:
    objects = overlay(name)
    found = {
        component(it): read_settings(module_of(container(it)["command"]), environment(it, objects))
        for it in workloads(objects)
    }
    gateway, router = found["gateway"], found["router"]
    assert isinstance(gateway, GatewaySettings)
    assert isinstance(router, RouterSettings)
    (it,) = [it for it in workloads(objects) if component(it) == "gateway"]
    probe = container(it)["readinessProbe"]
    assert gateway.unready_s > probe["periodSeconds"] * probe["failureThreshold"]
    # What waits 2.5 s and 3 checks in the front: deploy/front.
    assert gateway.unready_s >= 10
    assert router.drain_s >= gateway.drain_s


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_have_no_rights(folder: str) -> None:
    for workload in workloads(rendered(folder)):
        spec, it = pod(workload), container(workload)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert it["securityContext"] == {
            "allowPrivilegeEscalation": False,
            # TensorRT-LLM writes in several places.
            "readOnlyRootFilesystem": not it["image"].startswith("sluice-replica-gpu"),
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec["volumes"])
        mounted = {mount["name"] for mount in it["volumeMounts"]}
        claims = {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claims
        assert {"cpu", "memory"} <= it["resources"]["requests"].keys()
        assert "memory" in it["resources"]["limits"]


@EVERYWHERE
def test_state_directories_are_mounted(name: str) -> None:
    for workload in workloads(overlay(name)):
        mounts = [mount["mountPath"] for mount in container(workload)["volumeMounts"]]
        for variable, value in environment(workload, overlay(name)).items():
            if variable.endswith(("STATE_DIR", "ARTIFACTS_DIR")):
                assert any(f"{value}/".startswith(f"{mount}/") for mount in mounts), variable
        if component(workload) == "replica":
            assert "/dev/shm" in mounts


@EVERYWHERE
def test_names_that_others_give_are_there(name: str) -> None:
    objects = overlay(name)
    accounts = {name_of(it) for it in of_kind(objects, "ServiceAccount")}
    priorities = {name_of(it) for it in of_kind(objects, "PriorityClass")}
    for workload in workloads(objects):
        assert pod(workload)["serviceAccountName"] in accounts
        assert pod(workload)["priorityClassName"] in priorities
    targets = [
        (it["spec"]["scaleTargetRef"]["kind"], it["spec"]["scaleTargetRef"]["name"])
        for it in of_kind(objects, "HorizontalPodAutoscaler")
    ]
    # Pools are scaled by the control plane.
    assert targets == ([] if name == "small" else [("Deployment", "gateway")])
    for _, target in targets:
        (scaled,) = [it for it in workloads(objects) if name_of(it) == target]
        assert "replicas" not in scaled["spec"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_images_are_ours_with_a_version_and_no_secret_is_committed(folder: str) -> None:
    for workload in workloads(rendered(folder)):
        assert re.fullmatch(
            r"sluice(-replica-(cpu|gpu))?:\d+\.\d+\.\d+", container(workload)["image"]
        )
    assert not of_kind(rendered(folder), "Secret")


@EVERYWHERE
def test_whoever_makes_tables_makes_the_same(name: str) -> None:
    """Else a Job makes tables of one server, on which the service's cluster finds nothing."""
    (job,) = [it for it in workloads(rendered("migrations")) if "clickhouse" in name_of(it)]
    (service,) = [it for it in workloads(overlay(name)) if component(it) == "telemetry"]
    of_store = {
        key: value
        for key, value in environment(service, overlay(name)).items()
        if key.startswith("TELEMETRY__CLICKHOUSE_")
    }
    assert environment(job, rendered("migrations")) == of_store


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
    ("monitoring", "replica", 0),
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


@EVERYWHERE
def test_no_overlay_needs_kinds_that_a_cluster_may_lack(name: str) -> None:
    assert not [it for it in overlay(name) if "coreos.com" in it["apiVersion"]]


@EVERYWHERE
def test_monitors_name_ports_and_give_the_jobs_that_rules_read(name: str, tmp_path: Path) -> None:
    def from_here(folder: str) -> str:
        return os.path.relpath(HOME.resolve() / folder, tmp_path.resolve())

    chosen = {
        "namespace": "sluice",
        "resources": [from_here(f"overlays/{name}")],
        "components": [from_here("components/prometheus-operator")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
    objects = rendered(str(tmp_path))
    jobs: set[str] = set()
    for monitor in of_kind(objects, "PodMonitor", "ServiceMonitor"):
        spec = monitor["spec"]
        found = [it for it in workloads(objects) if matches(spec["selector"], pod_labels(it))]
        for endpoint in spec.get("podMetricsEndpoints", []) + spec.get("endpoints", []):
            for it in found:
                assert endpoint["port"] in {port["name"] for port in container(it)["ports"]}
            relabelings = endpoint.get("relabelings", [])
            jobs |= {rule["replacement"] for rule in relabelings} or {component(found[0])}
    scraped = yaml.safe_load((ROOT / "deploy/observability/prometheus/prometheus.yml").read_text())
    known = {it["job_name"] for it in scraped["scrape_configs"]}
    assert jobs == known - {"engine"}


def test_the_secrets_that_are_written_are_those_that_are_named() -> None:
    named = {
        (ref["name"], ref["key"])
        for folder in FOLDERS
        for workload in workloads(rendered(folder))
        for entry in container(workload)["env"]
        if (ref := entry.get("valueFrom", {}).get("secretKeyRef"))
    }
    assert named == {(name, key) for name, data in secrets().items() for key in data}
    assert secrets()["sluice-admin"] != secrets()["sluice-admin"]
    for workload in workloads(overlay("gpu")):
        keys = {entry["name"]: entry for entry in container(workload)["env"]}
        if component(workload) == "replica":
            reference = keys["AWS_ACCESS_KEY_ID"]["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "sluice-objects-read"


def test_the_script_writes_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(HOME / "make_secrets.py"))["main"]
    main(["--database-url", "postgresql+asyncpg://x", "--valkey-url", "redis://x"])
    written = json.loads(capsys.readouterr().out)
    assert written["kind"] == "List"
    assert "sluice-operator" not in {name_of(it) for it in written["items"]}
