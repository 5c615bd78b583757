"""With mutual TLS, who gets what at a gateway's address for operations (`GATEWAY__OPS_ADDRESS`)."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from cli.certificates import BUNDLE, create, settings_of
from gateway.server.operations import serving_operations
from gateway.server.probes import Probes
from sluice import certificates
from sluice.identity import CertificateRole
from tests.ports import free_port


@pytest.fixture
def ours(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "ours"
    create(folder, days=2, hosts=["127.0.0.1"])
    monkeypatch.setattr(certificates._Ours, "certificates", None)
    for name, value in settings_of(folder, CertificateRole.GATEWAY).items():
        monkeypatch.setenv(name, value)
    certificates.use(CertificateRole.GATEWAY)
    return folder


@pytest.fixture
def foreign(tmp_path) -> Path:
    create(tmp_path / "foreign", days=2, hosts=["127.0.0.1"])
    return tmp_path / "foreign"


@pytest_asyncio.fixture
async def address(ours) -> AsyncIterator[str]:
    async def page() -> bytes:
        return b"a 1\n"

    probes = Probes(read_metrics=page, not_ready_because=lambda: "")
    told = f"127.0.0.1:{free_port()}"
    async with serving_operations(told, probes):
        yield told


async def status(
    address: str, path: str, ours: Path, own: Path | None, scheme: str = "https"
) -> int:
    """Return how a GET ends; 0: without an answer."""
    tls = ssl.create_default_context(cafile=str(ours / BUNDLE))
    if own is not None:
        tls.load_cert_chain(own, own.with_name(f"{own.stem}-key.pem"))
    try:
        async with (
            asyncio.timeout(20),
            aiohttp.ClientSession() as http,
            http.get(f"{scheme}://{address}{path}", ssl=tls) as answer,
        ):
            return answer.status
    except aiohttp.ClientError:
        return 0


async def test_probes_are_for_everybody_metrics_for_monitoring_by_https_alone(
    address, ours, foreign
) -> None:
    monitoring, agent = ours / "monitoring.pem", ours / "agent.pem"
    for path in ("/healthz", "/readyz"):
        assert await status(address, path, ours, None) == 200, "kubelets have no certificate"
        assert await status(address, path, ours, agent) == 200
    assert await status(address, "/metrics", ours, monitoring) == 200
    assert await status(address, "/metrics", ours, None) == 403
    assert await status(address, "/metrics", ours, agent) == 403
    for path in ("/healthz", "/metrics"):
        assert await status(address, path, ours, foreign / "monitoring.pem") == 0
        assert await status(address, path, ours, None, scheme="http") in {0, 400}
