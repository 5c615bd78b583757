"""gRPC between processes with mutual TLS: who gets through, and with which certificate."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from cli.certificates import create, settings_of
from sluice import certificates, channels, shared_secret
from sluice.certificates import Certificates, MtlsSettings, install
from sluice.identity import CertificateRole, Service

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
# Methods with several answers are coroutines that write, or generators.
_GENERATED = ("generated/unary_stream", "generated/stream_stream")
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def be(folder: Path, role: CertificateRole) -> None:
    """Be a process with this certificate from now on."""
    names = {
        name.removeprefix("MTLS__").lower(): value
        for name, value in settings_of(folder, role).items()
    }
    install(Certificates(MtlsSettings.model_validate(names)), role)


class Handlers(grpc.GenericRpcHandler):
    """Answers with the certificate that the caller showed, by all four kinds of call."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        kind = str(handler_call_details.method).rpartition("/")[2].removeprefix("generated-")
        is_streamed = kind.endswith("stream")
        is_generated = "generated" in str(handler_call_details.method)

        async def answer(request: object, context: grpc.aio.ServicerContext) -> bytes | None:
            shown = context.auth_context()["x509_pem_cert"][0]
            if is_streamed:
                await context.write(shown)
                return None
            return shown

        async def generated(
            request: object, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[bytes]:
            yield context.auth_context()["x509_pem_cert"][0]

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(generated if is_generated else answer)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    create(folder, days=2)
    return folder


@pytest_asyncio.fixture
async def folder(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(certificates._Ours, "certificates", None)
    return Path(shutil.copytree(made, tmp_path / "own"))


@pytest_asyncio.fixture
async def address(folder) -> AsyncIterator[str]:
    """A router's server; the files are its own, so that others can be replaced beside them."""
    be(folder, CertificateRole.ROUTER)
    server = channels.server(())
    server.add_generic_rpc_handlers((Handlers(),))
    port = channels.add_port(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def call(channel: grpc.aio.Channel, kind: str = "unary_unary") -> bytes:
    path, kind = f"/{Service.ROUTER}/{kind.replace('/', '-')}", kind.rpartition("/")[2]
    method = getattr(channel, kind)(path, None, None)
    # Nothing is sent on streams: where that meets the refusal, gRPC tells of it instead.
    asked = b"?" if kind.startswith("unary") else silence()
    async with asyncio.timeout(20):
        if kind.endswith("unary"):
            return await method(asked)
        return await anext(aiter(method(asked)))


@pytest.mark.parametrize("kind", [*_KINDS, *_GENERATED])
async def test_an_allowed_caller_is_answered_and_others_get_the_fix(folder, address, kind):
    be(folder, CertificateRole.GATEWAY)
    async with channels.channel_to(address, CertificateRole.ROUTER, options=_OPTIONS) as channel:
        assert await call(channel, kind) == (folder / "gateway.pem").read_bytes()

    be(folder, CertificateRole.TELEMETRY)
    async with channels.channel_to(address, CertificateRole.ROUTER, options=_OPTIONS) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel, kind)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "telemetry.sluice.internal may not call" in (refused.value.details() or "")
    assert "use one with the DNS name" in (refused.value.details() or "")


async def test_without_a_certificate_or_with_a_foreign_one_nothing_is_said(
    folder, address, tmp_path
):
    create(tmp_path / "foreign", days=2)
    ca = (folder / "ca.pem").read_bytes()
    own = (tmp_path / "foreign" / name for name in ("gateway-key.pem", "gateway.pem"))
    name = ("grpc.ssl_target_name_override", "router.sluice.internal")
    for shown in (
        grpc.ssl_channel_credentials(ca),
        grpc.ssl_channel_credentials(ca, *(file.read_bytes() for file in own)),
    ):
        async with grpc.aio.secure_channel(address, shown, options=[name]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel)


async def test_a_server_of_another_role_is_not_talked_to(folder, address):
    be(folder, CertificateRole.GATEWAY)
    async with channels.channel_to(
        address, CertificateRole.CONTROL_PLANE, options=_OPTIONS
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "Hostname Verification" in (refused.value.details() or "")


async def test_replaced_certificates_are_used_by_the_next_connections_of_both_sides(
    folder, address, monkeypatch
):
    monkeypatch.setattr(channels, "_LOOK_S", 0.0)
    be(folder, CertificateRole.GATEWAY)
    link = channels.RenewedChannel(address, CertificateRole.ROUTER, options=_OPTIONS)
    first = await call(await link.current())
    assert await link.current() is await link.current()

    create(folder, days=2)  # the server's, too; and a new CA, as one that is about to expire
    (folder / "ca" / "next.pem").write_bytes((folder / "ca.pem").read_bytes())

    second = await call(await link.current())
    assert second == (folder / "gateway.pem").read_bytes()
    assert second != first
    shown = await asyncio.to_thread(_shown_by, address, folder)
    assert shown.strip() == (folder / "router.pem").read_text().strip()
    await link.aclose()


def _shown_by(address: str, folder: Path) -> str:
    import socket
    import ssl

    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(folder / "gateway.pem", folder / "gateway-key.pem")
    host, _, port = address.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")


@pytest_asyncio.fixture
async def plain(monkeypatch) -> AsyncIterator[str]:
    """A server without mutual TLS."""
    monkeypatch.setattr(certificates._Ours, "certificates", None)
    server = channels.server(())

    async def answer(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return repr(context.auth_context()).encode()

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(Service.ROUTER, {"unary_unary": handler}),)
    )
    port = channels.add_port(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_without_certificates_the_installations_token_is_enough(plain):
    link = channels.RenewedChannel(plain, CertificateRole.ROUTER, options=_OPTIONS)
    assert b"x509" not in await call(await link.current())
    await link.aclose()


@pytest.mark.parametrize("service", [None, Service.CONTROL, Service.ENGINE])
async def test_a_call_without_the_token_of_this_service_is_refused(plain, service):
    tokens = () if service is None else shared_secret.ours().tokens(service)
    async with grpc.aio.insecure_channel(plain) as channel:
        method = channel.unary_unary(f"/{Service.ROUTER}/unary_unary", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(b"?", metadata=[(channels.TOKEN, token) for token in tokens], timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "INSTALLATION__SECRET" in (refused.value.details() or "")


async def test_two_secrets_are_both_shown_and_both_accepted(plain, monkeypatch):
    server_knows = shared_secret.ours()
    old, new = "0123456789abcdef" * 2, os.environ["INSTALLATION__SECRET"]
    for secrets, passes in (([old, new], True), ([old], False)):
        monkeypatch.setattr(shared_secret._Ours, "secret", shared_secret.SharedSecret(secrets))
        async with channels.channel_to(plain, CertificateRole.ROUTER, options=_OPTIONS) as channel:
            if passes:
                await call(channel)
                continue
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel)
    assert server_knows.is_token("x", shared_secret.SharedSecret([old, new]).tokens("x"))


async def test_while_a_platform_is_upgraded_a_call_without_a_token_passes(plain, monkeypatch):
    monkeypatch.setattr(shared_secret.ours(), "is_required", False)
    async with grpc.aio.insecure_channel(plain) as channel:
        method = channel.unary_unary(f"/{Service.ROUTER}/unary_unary", None, None)
        assert await method(b"?", timeout=20)
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"?", metadata=[(channels.TOKEN, "0" * 64)], timeout=20)
