"""The manifests, read as their readers would."""

import json
import os
import re
import runpy
from functools import cache
from pathlib import Path

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from gateway.settings import GatewaySettings
from replica.agent.settings import AgentSettings
from router.settings import Settings as RouterSettings
from tests.unit.deploy.manifests import (
    ENGINE_PORTS,
    EVERYWHERE,
    FOLDERS,
    HOME,
    NEEDS_KUSTOMIZE,
    ROOT,
    component,
    container,
    environment,
    matches,
    name_of,
    of_kind,
    overlay,
    pod,
    pod_labels,
    rendered,
    secrets,
    workloads,
)
from tests.unit.deploy.processes import grace_s, module_of, port_of, read_settings

pytestmark = NEEDS_KUSTOMIZE
_schema_contents = cache(kubernetes_validate.utils.schema_contents)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_schemas_of_kubernetes_have_nothing_against_them(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads megabytes of definitions anew for every resource: here once.
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _schema_contents)
    for it in rendered(folder):
        if "coreos.com" not in it["apiVersion"]:
            kubernetes_validate.validate(it, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_process_takes_its_settings(folder: str) -> None:
    for workload in workloads(rendered(folder)):
        module = module_of(container(workload)["command"])
        read_settings(module, environment(workload, rendered(folder)))


@EVERYWHERE
def test_ports_equal_the_listening_ports_of_processes(name: str) -> None:
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
            waits = re.search(r"timeout (\d+)", hook["exec"]["command"][-1])
            assert waits, name_of(workload)
            needed += int(waits[1])
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
            r"sluice(-edge|-replica-(cpu|gpu))?:\d+\.\d+\.\d+", container(workload)["image"]
        )
    assert not of_kind(rendered(folder), "Secret")


@EVERYWHERE
def test_the_job_and_the_service_make_the_same_tables(name: str) -> None:
    """Else a Job makes tables of one server, on which the service's cluster finds nothing."""
    (job,) = [it for it in workloads(rendered("migrations")) if "clickhouse" in name_of(it)]
    (service,) = [it for it in workloads(overlay(name)) if component(it) == "telemetry"]
    of_store = {
        key: value
        for key, value in environment(service, overlay(name)).items()
        if key.startswith("TELEMETRY__CLICKHOUSE_")
    }
    assert environment(job, rendered("migrations")) == of_store


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


def test_written_secrets_equal_the_named_ones() -> None:
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
