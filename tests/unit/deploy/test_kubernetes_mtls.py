"""components/mtls: rendered on top of an overlay, as an operator would list it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from sluice.certificates import MtlsSettings
from sluice.identity import CALLERS, CertificateRole, Service, server_name
from tests.unit.deploy.manifests import (
    HOME,
    NEEDS_KUSTOMIZE,
    Object,
    component,
    container,
    environment,
    name_of,
    of_kind,
    pod,
    rendered,
    workloads,
)

pytestmark = NEEDS_KUSTOMIZE
ROLES = {role: role for role in ("gateway", "router", "control-plane", "telemetry")} | {
    "replica": "agent"
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    folder = tmp_path_factory.mktemp("overlay")

    def at(name: str) -> str:
        return os.path.relpath(HOME / name, folder)

    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "sluice",
        "resources": [at("overlays/production")],
        "components": [at("components/prometheus-operator"), at("components/mtls")],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(listed))
    return rendered(os.path.relpath(folder, HOME))


def certificates(objects: tuple[Object, ...]) -> dict[str, Any]:
    return {it["spec"]["secretName"]: it["spec"] for it in of_kind(objects, "Certificate")}


def test_every_process_has_its_certificate_and_both_cas(objects: tuple[Object, ...]) -> None:
    made, seen, called = certificates(objects), set(), set()
    for workload in workloads(objects):
        role = ROLES[component(workload)]
        seen.add(role)
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)
        values = environment(workload, objects)
        given = {name: value for name, value in values.items() if name.startswith("MTLS__")}
        settings = MtlsSettings.model_validate(
            {name.removeprefix("MTLS__").lower(): value for name, value in given.items()}
        )
        volumes = {it["name"]: it for it in pod(workload)["volumes"]}
        mounts = {it["mountPath"]: it["name"] for it in container(workload)["volumeMounts"]}
        secret = volumes[mounts[str(settings.certificate.parent)]]["secret"]["secretName"]
        assert server_name(CertificateRole(role), settings.domain) in made[secret]["dnsNames"]
        assert (settings.certificate.name, settings.key.name) == ("tls.crt", "tls.key")
        sources = volumes[mounts[str(settings.ca)]]["projected"]["sources"]
        files = {item["path"] for it in sources for item in it["secret"]["items"]}
        assert {item["key"] for it in sources for item in it["secret"]["items"]} == {"ca.crt"}
        assert {it["secret"]["name"] for it in sources} <= set(made)
        assert settings.engine_ca.parent == settings.ca
        assert settings.engine_ca.name in files
        assert all(Path(file).suffix == ".crt" for file in files), "others are no CAs"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container(workload)[probe]["httpGet"]["scheme"] == "HTTPS"
        for name, url in urls_of_ours(values):
            called.add(urlsplit(url).hostname)
            assert url.startswith("https://"), name
    assert seen == set(ROLES.values())
    assert called == {"control-plane", "gateway", "telemetry"}


def urls_of_ours(values: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Whatever variable names them: of addresses of Services, the first part of the name is ours."""
    for name, value in values.items():
        if name.endswith("_URL") and (urlsplit(value).hostname or "").split(".")[0] in ROLES:
            yield name, value


def test_callers_of_engines_are_signed_by_a_ca_of_their_own(
    objects: tuple[Object, ...],
) -> None:
    made = certificates(objects)
    for role in CertificateRole:
        if role is CertificateRole.ENGINE:
            continue
        issuer = made[f"sluice-{role}-tls"]["issuerRef"]["name"]
        is_caller = role in CALLERS[Service.ENGINE]
        assert issuer == ("sluice-engine-callers" if is_caller else "sluice-internal"), role
    issuers = {name_of(it) for it in of_kind(objects, "Issuer")}
    assert {it["issuerRef"]["name"] for it in made.values()} <= issuers
    assert "engine.sluice.internal" in made["sluice-agent-tls"]["dnsNames"]


def test_monitors_verify_their_targets_and_show_a_certificate(
    objects: tuple[Object, ...],
) -> None:
    made, expected = certificates(objects), set()
    for monitor in of_kind(objects, "PodMonitor", "ServiceMonitor"):
        (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        tls = endpoint["tlsConfig"]
        assert endpoint["scheme"] == "https"
        assert tls["keySecret"]["name"] == tls["cert"]["secret"]["name"] == "sluice-monitoring-tls"
        role = tls["serverName"].partition(".")[0]
        expected.add(role)
        ca = made[f"sluice-{role}-tls"]["issuerRef"]["name"]
        assert tls["ca"]["secret"]["name"] == f"{ca}-ca"
    assert expected == set(ROLES.values())
