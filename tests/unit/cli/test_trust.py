"""Whose certificates the command line takes."""

import ssl
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cli import admin, api, top_commands
from cli.app import app
from cli.certificates import create, settings_of
from sluice import certificates
from sluice.identity import Role


@pytest.fixture
def mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path, days=2, hosts=["localhost"])
    monkeypatch.setattr(certificates._Ours, "certificates", None)
    for name, value in settings_of(tmp_path, Role.OPERATOR).items():
        monkeypatch.setenv(name, value)
    certificates.use(Role.OPERATOR)


def test_without_mutual_tls_everybodys_authorities_are_trusted() -> None:
    assert certificates.ours() is None
    assert api.trust() is True


@pytest.mark.usefixtures("mutual_tls")
def test_with_mutual_tls_ours_are_trusted_besides_everybodys() -> None:
    context, public = api.trust(), httpx.create_ssl_context(trust_env=False)
    assert isinstance(context, ssl.SSLContext)

    def known(one: ssl.SSLContext) -> set[str]:
        return {str(it["serialNumber"]) for it in one.get_ca_certs()}

    ours = certificates.ours()
    assert ours is not None
    assert known(context) == known(public) | known(ours.client_context())
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.usefixtures("mutual_tls")
@pytest.mark.parametrize(
    ("arguments", "is_ours"),
    [(["--prometheus", "https://p"], False), (["--metrics-url", "https://g/metrics"], True)],
)
def test_a_prometheus_is_checked_as_anybody_is(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], is_ours: bool
) -> None:
    told: list[object] = []

    def client(*, verify: object, **_: object) -> httpx.AsyncClient:
        told.append(verify)
        raise KeyboardInterrupt

    monkeypatch.setattr(top_commands.httpx, "AsyncClient", client)
    CliRunner().invoke(app, ["top", "--once", *arguments])

    assert [isinstance(it, ssl.SSLContext) for it in told] == [is_ours]


@pytest.mark.usefixtures("mutual_tls")
@pytest.mark.parametrize("name", ["SLUICE_ADMIN_URL", "SLUICE_TELEMETRY_URL"])
def test_with_mutual_tls_no_key_is_sent_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def api_is_not_made(*_: object) -> None:
        raise AssertionError("the key was about to be sent")

    monkeypatch.setenv("SLUICE_ADMIN_KEY", "k")
    monkeypatch.setenv("SLUICE_ADMIN_URL", "https://127.0.0.1:1")
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setattr(admin, "Api", api_is_not_made)
    command = {"SLUICE_ADMIN_URL": ["tenants", "list"], "SLUICE_TELEMETRY_URL": ["usage"]}[name]

    told = CliRunner().invoke(app, command)

    assert told.exit_code == 1
    assert f"{name} is http://127.0.0.1:1: with mutual TLS" in told.stderr
