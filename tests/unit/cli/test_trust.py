"""Whose certificates the command line takes."""

import asyncio
import json
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from cli import api
from cli.app import app
from cli.certificates import create, settings_of
from cli.compose_commands import _wait_token
from cli.stack.home import Home, write_atomic
from sluice import certificates
from sluice.identity import CertificateRole


@pytest.fixture
def mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path, days=2, hosts=["localhost"])
    monkeypatch.setattr(certificates._Ours, "certificates", None)
    for name, value in settings_of(tmp_path, CertificateRole.OPERATOR).items():
        monkeypatch.setenv(name, value)
    certificates.use(CertificateRole.OPERATOR)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the client that a command makes checks servers with; the command ends there."""
    found: list[object] = []

    def client(*, verify: object, **_: object) -> httpx.AsyncClient:
        found.append(verify)
        raise KeyboardInterrupt

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return found


def test_the_key_of_a_first_token_goes_to_a_gateway_that_is_checked(
    verified: list[object],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(_wait_token("https://gateway/v1", "sk-key", 1.0))
    assert verified == [True]


def test_without_mutual_tls_public_authorities_are_trusted() -> None:
    assert certificates.ours() is None
    assert api.trust() is True


@pytest.mark.usefixtures("mutual_tls")
def test_with_mutual_tls_the_fleets_authorities_are_trusted_besides_the_public_ones() -> None:
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
def test_a_key_with_a_passphrase_is_refused_without_a_prompt() -> None:
    ours = certificates.ours()
    assert ours is not None
    private = serialization.load_pem_private_key(ours.key_file.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    ours.key_file.write_bytes(
        private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    with pytest.raises(ssl.SSLError, match="passphrase"):
        api.trust()


@pytest.mark.usefixtures("mutual_tls")
@pytest.mark.parametrize(
    ("arguments", "is_ours"),
    [(["--prometheus", "https://p"], False), (["--metrics-url", "https://g/metrics"], True)],
)
def test_a_prometheus_is_checked_as_anybody_is(
    verified: list[object], arguments: list[str], is_ours: bool
) -> None:
    CliRunner().invoke(app, ["top", "--once", *arguments])

    assert [isinstance(it, ssl.SSLContext) for it in verified] == [is_ours]


@pytest.mark.usefixtures("mutual_tls")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["tenants", "list"], "SLUICE_ADMIN_URL"),
        (["usage"], "SLUICE_TELEMETRY_URL"),
        (["top", "--once"], "SLUICE_ADMIN_URL"),
        (["compose", "bootstrap"], "SLUICE_ADMIN_URL"),
    ],
    ids=["tenants", "usage", "top", "bootstrap"],
)
def test_with_mutual_tls_no_key_is_sent_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    def api_is_not_made(*_: object) -> None:
        raise AssertionError("the key was about to be sent")

    home = Home(tmp_path / "home")
    write_atomic(home.ports_file, json.dumps({"gateway_ops": 4, "router_http": 2}))
    monkeypatch.setenv("SLUICE_HOME", str(home.root))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:3/v1")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "k")
    monkeypatch.setenv("SLUICE_ADMIN_URL", "https://127.0.0.1:1")
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setattr(api.ApiClient, "__init__", api_is_not_made)

    told = CliRunner().invoke(app, command)

    assert told.exit_code == 1
    assert f"{name} is http://127.0.0.1:1: with mutual TLS" in told.stderr


@pytest.mark.usefixtures("mutual_tls")
def test_https_in_capitals_is_https(
    verified: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "k")
    monkeypatch.setenv("SLUICE_ADMIN_URL", "HTTPS://127.0.0.1:1")

    CliRunner().invoke(app, ["tenants", "list"])

    assert [isinstance(it, ssl.SSLContext) for it in verified] == [True]
