"""The manifests of Kubernetes, rendered by kustomize as it is in kubectl."""

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

ROOT = Path(__file__).parents[3]
HOME = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("small", "production", "gpu")
ENGINE_PORTS = range(32768, 61000)

Object = dict[str, Any]


@cache
def rendered(folder: str) -> tuple[Object, ...]:
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    done = subprocess.run(
        [*program, str(HOME / folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecated fields are told there
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


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


NEEDS_KUSTOMIZE = pytest.mark.skipif(
    shutil.which("kubectl") is None and shutil.which("kustomize") is None,
    reason="neither kubectl nor kustomize is on PATH: manifests cannot be rendered",
)
EVERYWHERE = pytest.mark.parametrize("name", OVERLAYS)
FOLDERS = (*(f"overlays/{name}" for name in OVERLAYS), "migrations")
