"""TLS: streams, certificates that are replaced while streams run, clients that speak no TLS."""

import asyncio
import base64
import hashlib
import secrets
import ssl
import time
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from gateway.server.tls import TlsFiles
from gateway.testing import Plan
from sluice.wire.router.v1 import router_pb2 as wire

pytestmark = pytest.mark.real

# The curve P-256 (FIPS 186-4).
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_EC_KEY, _P256, _ECDSA = "2a8648ce3d0201", "2a8648ce3d030107", "2a8648ce3d040302"
_COMMON_NAME, _ALT_NAME, _BASIC = "550403", "551d11", "551d13"


def _add(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None:
        return a or b
    if a[0] == b[0] and (a[1] + b[1]) % _P == 0:
        return None
    if a == b:
        slope = (3 * a[0] * a[0] - 3) * pow(2 * a[1], -1, _P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


def _times(factor: int, point: tuple[int, int]) -> tuple[int, int]:
    result, base = None, point
    while factor:
        if factor & 1:
            result = _add(result, base)
        base, factor = _add(base, base), factor >> 1
    assert result is not None
    return result


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    if size < 128:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + content


def _int(value: int) -> bytes:
    return _der(2, value.to_bytes(value.bit_length() // 8 + 1))


def _oid(body: str) -> bytes:
    return _der(6, bytes.fromhex(body))


def _pem(label: str, content: bytes) -> str:
    return f"-----BEGIN {label}-----\n{base64.encodebytes(content).decode()}-----END {label}-----\n"


def write_certificate(home: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, signed by itself, and its key; return both files."""
    secret = secrets.randbelow(_N - 1) + 1
    point = b"\x04" + b"".join(value.to_bytes(32) for value in _times(secret, _G))
    algorithm = _der(0x30, _oid(_ECDSA))
    name = _der(0x30, _der(0x31, _der(0x30, _oid(_COMMON_NAME), _der(12, b"test"))))
    now = time.time()
    dates = [time.strftime("%y%m%d%H%M%SZ", time.gmtime(now + d)) for d in (-3600, 86400)]
    alt = _der(4, _der(0x30, _der(0x87, bytes((127, 0, 0, 1)))))
    authority = _der(4, _der(0x30, _der(1, b"\xff")))
    extensions = _der(
        0x30,
        _der(0x30, _oid(_ALT_NAME), alt),
        _der(0x30, _oid(_BASIC), _der(1, b"\xff"), authority),
    )
    content = _der(
        0x30,
        _der(0xA0, _int(2)),
        _int(secrets.randbits(64)),
        algorithm,
        name,
        _der(0x30, *(_der(23, date.encode()) for date in dates)),
        name,
        _der(0x30, _der(0x30, _oid(_EC_KEY), _oid(_P256)), _der(3, b"\x00", point)),
        _der(0xA3, extensions),
    )
    nonce = secrets.randbelow(_N - 1) + 1
    r = _times(nonce, _G)[0] % _N
    digest = int.from_bytes(hashlib.sha256(content).digest())
    s = pow(nonce, -1, _N) * (digest + r * secret) % _N
    signature = _der(3, b"\x00", _der(0x30, _int(r), _int(s)))
    key = _der(
        0x30, _int(1), _der(4, secret.to_bytes(32)), _der(0xA0, _oid(_P256)),
        _der(0xA1, _der(3, b"\x00", point)),
    )  # fmt: skip
    cert_file, key_file = home / "cert.pem", home / "key.pem"
    cert_file.write_text(_pem("CERTIFICATE", _der(0x30, content, algorithm, signature)))
    key_file.write_text(_pem("EC PRIVATE KEY", key))
    return cert_file, key_file


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


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path) -> None:
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
