"""components/node-scaling: rendered on top of an overlay, as an operator would list it."""

import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from control_plane.scaling.actuators import Actuator, read_actuators
from control_plane.settings import Settings
from tests.unit.deploy.manifests import (
    HOME,
    NEEDS_KUSTOMIZE,
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
from tests.unit.deploy.processes import read_settings

pytestmark = NEEDS_KUSTOMIZE


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    folder = tmp_path_factory.mktemp("overlay")
    listed = {
        "namespace": "sluice",
        "resources": [os.path.relpath(HOME / "overlays/gpu", folder)],
        "components": [os.path.relpath(HOME / "components/node-scaling", folder)],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(listed))
    return rendered(os.path.relpath(folder, HOME))


def _control_plane(objects: tuple[Object, ...]) -> Object:
    (found,) = [it for it in workloads(objects) if component(it) == "control-plane"]
    return found


def test_the_schemas_have_nothing_against_it_and_the_process_takes_its_settings(
    objects: tuple[Object, ...], tmp_path: Path
) -> None:
    known = {(it["kind"], name_of(it)) for it in overlay("gpu")}
    for it in objects:
        if (it["kind"], name_of(it)) not in known or name_of(it) == "control-plane":
            kubernetes_validate.validate(it, kubernetes_validate.latest_version(), strict=True)
    settings = read_settings("control_plane", environment(_control_plane(objects), objects))
    assert isinstance(settings, Settings)
    assert settings.scaling_actuators is not None
    (mapped,) = [it for it in of_kind(objects, "ConfigMap") if "actuators.json" in it["data"]]
    file = tmp_path / "actuators.json"
    file.write_text(mapped["data"]["actuators.json"])
    sets = {name_of(it) for it in of_kind(objects, "StatefulSet")}
    assert {one.nodes for one in read_actuators(file).values()} <= sets


def test_the_control_plane_may_scale_the_nodes_and_nothing_else(
    objects: tuple[Object, ...],
) -> None:
    (role,) = of_kind(objects, "Role")
    (binding,) = of_kind(objects, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": ["gpu-node"],
            "verbs": ["get", "patch"],
        }
    ]
    assert binding["roleRef"]["name"] == name_of(role)
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", "control-plane")
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")


def test_the_token_is_where_an_actuator_looks_and_no_other_pod_has_one(
    objects: tuple[Object, ...],
) -> None:
    workload = _control_plane(objects)
    assert all(pod(it)["automountServiceAccountToken"] is False for it in workloads(objects))
    volumes = {it["name"]: it for it in pod(workload)["volumes"]}
    (mount,) = [it for it in container(workload)["volumeMounts"] if "secrets" in it["mountPath"]]
    files = {
        entry["path"]
        for source in volumes[mount["name"]]["projected"]["sources"]
        for entry in (
            [source["serviceAccountToken"]]
            if "serviceAccountToken" in source
            else next(iter(source.values()))["items"]
        )
    }
    one = Actuator(name="gpu", kind="kubernetes", nodes="gpu-node", nodes_max=1)
    assert {one.token_file, one.ca_file} <= {Path(mount["mountPath"]) / file for file in files}
    assert "namespace" in files
