"""gRPC between platform processes, with the installation's token, and mutual TLS if configured.

Every call sends a token, derived from the installation's secret for the called service, and every
server verifies the token. The token is sent and verified once per call, not per message.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
import structlog

from sluice.certificates import Certificates, Loaded, ours
from sluice.identity import CertificateRole, Service, allowed, identity_of, refusal, server_name
from sluice.shared_secret import SharedSecret
from sluice.shared_secret import ours as shared_secret

log = structlog.get_logger(__name__)

Options = Sequence[tuple[str, Any]]
_Context = grpc.aio.ServicerContext[Any, Any]
# Least seconds between two checks for new certificates, because a check lists a directory.
_LOOK_S = 1.0
# Seconds for which calls may still run on a replaced channel, counted from the next replacement.
_GRACE_S = 300.0
_NAMES = "x509_subject_alternative_name"
TOKEN = "sluice-token"  # noqa: S105 - the name of a header
_UNKNOWN = (
    "the call shows no token of this installation: give caller and server the same"
    " INSTALLATION__SECRET"
)


def channel_to(address: str, role: CertificateRole, *, options: Options) -> grpc.aio.Channel:
    """Return a channel to a platform process.

    The certificate is read once, now. Use a `RenewedChannel` for a channel that lives longer than a
    certificate.

    Args:
        address: host:port.
        role: Role that the peer's certificate must have.
        options: Options of gRPC.
    """
    certificates = ours()
    if certificates is None:
        bare = grpc.aio.insecure_channel(address, options=options)
    else:
        bare = _secure(address, role, options, certificates.fresh(), certificates.domain)
    return _TokenChannel(bare)


def engine_header() -> tuple[str, str]:
    """Return the name and the value of the header that engines require.

    Triton adds its own prefix to the name. An engine accepts the token of one secret only, so the
    name identifies the secret, and callers send one header per secret.
    """
    return _engine_headers()[0]


def _engine_headers() -> list[tuple[str, str]]:
    tokens = shared_secret().tokens(Service.ENGINE)
    return [(f"sluice-{token[:8]}", token[8:]) for token in tokens]


def _metadata(method: str) -> tuple[tuple[str, str], ...]:
    service = _service_of(method)
    if service == Service.ENGINE:
        return tuple((f"triton-grpc-protocol-{name}", it) for name, it in _engine_headers())
    return tuple((TOKEN, token) for token in shared_secret().tokens(service))


def _service_of(method: str | bytes) -> str:
    return (method.decode() if isinstance(method, bytes) else method).strip("/").rpartition("/")[0]


class _TokenChannel(grpc.aio.Channel):
    """A channel whose calls send the token of the called service."""

    def __init__(self, bare: grpc.aio.Channel) -> None:
        self._bare = bare

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._bare.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self._bare.__aexit__(exc_type, exc_val, exc_tb)

    async def close(self, grace: float | None = None) -> None:
        await self._bare.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._bare.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._bare.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._bare.channel_ready()

    def _with_token(self, make: Callable[..., Any], method: str, *more: Any, **named: Any) -> Any:
        return partial(make(method, *more, **named), metadata=_metadata(method))

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Any:
        return self._with_token(self._bare.unary_unary, method, *more, **named)

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Any:
        return self._with_token(self._bare.unary_stream, method, *more, **named)

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Any:
        return self._with_token(self._bare.stream_unary, method, *more, **named)

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Any:
        return self._with_token(self._bare.stream_stream, method, *more, **named)


def _secure(
    address: str, role: CertificateRole, options: Options, loaded: Loaded, domain: str
) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.certificate)
    name = ("grpc.ssl_target_name_override", server_name(role, domain))
    return grpc.aio.secure_channel(address, credentials, options=(*options, name))


class RenewedChannel:
    """A long-lived channel, which is replaced after the certificate has been replaced.

    A plain gRPC channel also reconnects, but always with its first certificate.
    """

    def __init__(self, address: str, role: CertificateRole, *, options: Options) -> None:
        """Create a channel by `channel_to`, with the same arguments."""
        self._make = partial(channel_to, address, role, options=options)
        self._certificates = ours()
        self._loaded = self._certificates and self._certificates.fresh()
        self._look_at_s = time.monotonic() + _LOOK_S
        self._channel = self._make()
        self._last: grpc.aio.Channel | None = None
        self._ending: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def _now(self) -> Loaded | None:
        now_s = time.monotonic()
        if self._certificates is None or now_s < self._look_at_s:
            return self._loaded
        self._look_at_s = now_s + _LOOK_S
        return self._certificates.fresh()

    async def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call, while running calls on older channels continue.

        Each replacement ends the calls on the previously replaced channel after `_GRACE_S`. So a
        certificate and its CA may be replaced in quick succession.
        """
        loaded = self._now()
        if loaded is not self._loaded:
            self._loaded = loaded
            last, self._last, self._channel = self._last, self._channel, self._make()
            if last is not None:
                ending = asyncio.get_running_loop().create_task(last.close(_GRACE_S))
                self._ending[last] = ending
                ending.add_done_callback(lambda _: self._ending.pop(last))
        return self._channel

    async def aclose(self) -> None:
        """End all calls, and all channels."""
        ending = dict(self._ending)
        for task in ending.values():
            task.cancel()
        await asyncio.gather(*ending.values(), return_exceptions=True)
        for each in (self._channel, self._last, *ending):
            if each is not None:
                await each.close(0)


def server(options: Options) -> grpc.aio.Server:
    """Return a server for platform processes, which listens after `add_port`.

    Raises:
        RuntimeError: This process has no installation secret.
    """
    return grpc.aio.server(options=options, interceptors=(_Callers(shared_secret(), ours()),))


def add_port(serving: grpc.aio.Server, address: str) -> int:
    """Make a server listen at host:port, and return the port.

    Raises:
        RuntimeError: The address is in use.
    """
    certificates = ours()
    if certificates is None:
        return serving.add_insecure_port(address)
    return serving.add_secure_port(address, _server_credentials(certificates))


def _server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    def configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
        pair = (loaded.key, loaded.certificate)
        return grpc.ssl_server_certificate_configuration([pair], loaded.ca)

    told = certificates.fresh()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for the next connection, or None if unchanged. Thread-safe."""
        nonlocal told
        now = certificates.fresh()
        if now is told:
            return None
        told = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        configuration(told),
        newest,  # pyright: ignore[reportArgumentType] - None is documented, the stubs lack it
        require_client_authentication=True,
    )


class _Callers(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument] - none at run time
    """Admits only calls with a token and, with mutual TLS, a certificate of an allowed role."""

    def __init__(self, secret: SharedSecret, certificates: Certificates | None) -> None:
        self._secret = secret
        self._domain = None if certificates is None else certificates.domain

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the called method's handler, preceded by the check of the caller."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service = _service_of(handler_call_details.method)
        make, method = next(
            (make, method) for name, make in _MAKERS if (method := getattr(handler, name))
        )

        async def checked(request: object, context: _Context) -> object:
            await self._check(service, context)
            return await method(request, context)

        async def generated(request: object, context: _Context) -> AsyncIterator[object]:
            await self._check(service, context)
            async for answer in method(request, context):
                yield answer

        shown = generated if inspect.isasyncgenfunction(method) else checked
        return make(shown, handler.request_deserializer, handler.response_serializer)

    async def _check(self, service: str, context: _Context) -> None:
        shown = [value for name, value in context.invocation_metadata() or () if name == TOKEN]
        if not self._secret.is_token(service, shown):
            log.warning("caller_unknown", peer=context.peer(), service=service)
            if shown or self._secret.is_required:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, _UNKNOWN)
        if self._domain is None:
            return
        names = context.auth_context().get(_NAMES, ())
        identity = identity_of((name.decode(errors="replace") for name in names), self._domain)
        if not allowed(identity, service):
            why = refusal(identity, service, self._domain)
            log.warning("caller_refused", peer=context.peer(), identity=str(identity), reason=why)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


_MAKERS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("unary_unary", grpc.unary_unary_rpc_method_handler),
    ("unary_stream", grpc.unary_stream_rpc_method_handler),
    ("stream_unary", grpc.stream_unary_rpc_method_handler),
    ("stream_stream", grpc.stream_stream_rpc_method_handler),
)
