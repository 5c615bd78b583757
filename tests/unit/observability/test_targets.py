"""targets.py: whom the script that tells Prometheus its targets asks, and whom it believes."""

import io
import json
import runpy
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest

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
