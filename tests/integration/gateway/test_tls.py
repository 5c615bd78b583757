"""TLS: streams, certificates that are replaced while streams run, clients that speak no TLS."""

import asyncio
import re
import ssl
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.server.tls import TlsFiles
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.own_certificate import CERTIFICATE_HOURS, HOUR, write_certificate
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real


def client_of(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": 150,
    "ignore_eos": True,
}


def plan(submit: wire.Submit) -> Plan:
    outcome = wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
    return Plan([[300 + i % 7] for i in range(submit.output_tokens_max)], outcome)


async def streamed(http: httpx.AsyncClient, begun: asyncio.Event) -> str:
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        assert response.status_code == 200
        async for part in response.aiter_text():
            begun.set()
            text += part
    return text


async def test_streams_go_on_while_the_certificate_is_replaced(world, tmp_path) -> None:
    cert, key = write_certificate(tmp_path)
    old = client_of(cert)
    async with world(tls_cert=cert, tls_key=key) as w:
        w.router.plan, w.router.step_s = plan, 0.01
        url = w.base_url.replace("http://", "https://")
        headers = {"authorization": "Bearer sk-one"}
        begun = asyncio.Event()
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, verify=old, timeout=60) as http,
            asyncio.TaskGroup() as tasks,
        ):
            stream = tasks.create_task(streamed(http, begun))
            await begun.wait()
            cert.write_text("half a file")
            w.gateway.reload_certificate()  # is told in the log, and changes nothing
            assert b"gateway_certificate_stale 1.0" in w.gateway.metrics.page()
            assert (await http.get("/healthz")).status_code == 200
            write_certificate(tmp_path)
            w.gateway.reload_certificate()
            assert b"gateway_certificate_stale 0.0" in w.gateway.metrics.page()
            assert re.search(
                rb"gateway_certificate_expiry_seconds 8\d{4}\.", w.gateway.metrics.page()
            )
            async with httpx.AsyncClient(verify=client_of(cert), base_url=url) as other:
                assert (await other.get("/healthz")).status_code == 200
            async with httpx.AsyncClient(verify=old, base_url=url) as other:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await other.get("/healthz")
        assert stream.result().count('"content":') >= 150
        assert stream.result().endswith("data: [DONE]\n\n")


async def test_workers_speak_tls(world, fleets, tmp_path) -> None:
    cert, key = write_certificate(tmp_path)
    async with world() as w, fleets(w.settings, tls_cert=cert, tls_key=key) as fleet:
        w.router.plan, w.router.step_s = plan, 0.002
        headers = {"authorization": "Bearer sk-one"}
        begun = asyncio.Event()
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{fleet.port}",
            headers=headers,
            verify=client_of(cert),
            timeout=60,
        ) as http:
            texts = await asyncio.gather(*(streamed(http, begun) for _ in range(4)))
        for text in texts:
            assert text.count('"content":') >= 150
            assert text.endswith("data: [DONE]\n\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            assert b"HTTP" not in await reader.read()
        writer.close()


@pytest.mark.parametrize("issuer", ["test", "of another name"])
def test_until_when_clients_take_a_certificate(issuer: str, tmp_path) -> None:
    cert, key = write_certificate(tmp_path, 5 * HOUR, issuer)
    files, seen = TlsFiles(cert, key), x509.load_pem_x509_certificate(cert.read_bytes())
    assert files.expires_unix_s == seen.not_valid_after_utc.timestamp()
    for ends_in, refused in ((-1 * HOUR, True), (99 * HOUR, True), (9 * HOUR, False)):
        write_certificate(tmp_path, ends_in, issuer)
        files.reload_changed()
        assert (files.left_s(time.time()) == 0) is refused
        assert not files.is_stale


def test_a_certificate_that_no_client_takes_is_no_reason_not_to_start(tmp_path) -> None:
    files = TlsFiles(*write_certificate(tmp_path, curve=ec.SECP256K1()))
    assert files.left_s(time.time()) == 0
    files.reload_changed()
    assert not files.is_stale


def test_a_certificate_that_came_early_is_good_when_its_time_has_come(tmp_path) -> None:
    early = timedelta(seconds=2)
    while (  # a machine that is slow makes one that is good at once
        files := TlsFiles(*write_certificate(tmp_path, CERTIFICATE_HOURS * HOUR + early))
    ).left_s(time.time()):
        early *= 2
    deadline_s = time.monotonic() + 60
    while files.left_s(time.time()) == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
        files.reload_changed()
    assert files.left_s(time.time()) > 3600


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(tmp_path) -> None:
    cert, key = write_certificate(tmp_path)
    sealed = tmp_path / "sealed.pem"
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    sealed.write_bytes(
        private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    with pytest.raises(ssl.SSLError, match="passphrase"):
        TlsFiles(cert, sealed)
    files = TlsFiles(cert, key)
    key.write_bytes(sealed.read_bytes())
    files.reload_changed()
    assert files.is_stale
