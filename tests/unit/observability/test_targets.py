"""targets.py: whom the script that tells Prometheus its targets asks, and whom it believes."""

import io
import json
import runpy
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.certificates import create
from tests.unit.observability.known import PROMETHEUS

ENV = """OPENAI_BASE_URL={scheme}://127.0.0.1:1/v1
SLUICE_ADMIN_URL={scheme}://127.0.0.1:2
SLUICE_ADMIN_KEY=k
"""


def asked_with(home: Path, monkeypatch: pytest.MonkeyPatch, env: str) -> list[Any]:
    (home / "env").write_text(env)
    ports = {"gateway_ops": 6, "router_http": 3, "agent_http": 4, "telemetry_http": 5}
    (home / "ports.json").write_text(json.dumps(ports))
    contexts: list[Any] = []

    def urlopen(_request: object, *, context: object = None, **_: object) -> io.BytesIO:
        contexts.append(context)
        return io.BytesIO(b'{"data": [], "has_more": false}')

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    script = runpy.run_path(str(PROMETHEUS / "targets.py"))
    assert script["targets"](home)["control-plane"][0]["targets"] == ["127.0.0.1:2"]
    return contexts


def test_a_stack_with_tls_is_believed_by_its_own_authorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "certificates", days=2)
    ca = tmp_path / "certificates" / "ca.pem"
    env = ENV.format(scheme="https") + f"SSL_CERT_FILE={ca}\n"

    (context,) = asked_with(tmp_path, monkeypatch, env)

    assert context.get_ca_certs() == ssl.create_default_context(cafile=str(ca)).get_ca_certs()


def test_a_stack_without_tls_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_with(tmp_path, monkeypatch, ENV.format(scheme="http")) == [None]


@pytest.mark.parametrize(("is_shared", "mode"), [(False, 0o600), (True, 0o644)])
def test_the_key_of_alerts_lies_beside_the_targets(
    tmp_path: Path, *, is_shared: bool, mode: int
) -> None:
    write_key = runpy.run_path(str(PROMETHEUS / "targets.py"))["write_key"]
    for key in ("one", "two"):
        write_key(tmp_path, key, is_shared=is_shared)
    assert (tmp_path / "alert-key").read_text() == "two"
    assert (tmp_path / "alert-key").stat().st_mode & 0o777 == mode
    assert [it.name for it in tmp_path.iterdir()] == ["alert-key"]


def test_the_example_reports_alerts_to_the_control_plane_with_that_key() -> None:
    (where,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["alerting"][
        "alertmanagers"
    ]
    assert where["path_prefix"] == "/v1/alertmanager"
    assert where["authorization"] == {"credentials_file": "targets/alert-key"}
    assert where["file_sd_configs"] == [{"files": ["targets/control-plane.json"]}]
