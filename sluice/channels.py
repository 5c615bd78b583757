"""gRPC between our processes: with mutual TLS where it is set, as it always was where not."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from sluice.certificates import Certificates, Loaded, ours
from sluice.identity import Role, allowed, identity_of, refusal, server_name

log = structlog.get_logger(__name__)

Options = Sequence[tuple[str, Any]]
_Context = grpc.aio.ServicerContext[Any, Any]
# So long certificates are taken for unchanged: calls are many, and a look lists a directory.
_LOOK_S = 1.0
# So long calls of a channel before the last may go on.
_GRACE_S = 300.0
_NAMES = "x509_subject_alternative_name"


def channel_to(address: str, role: Role, *, options: Options) -> grpc.aio.Channel:
    """Return a channel to a process of ours.

    Its certificate is read now: one that lives longer than a connection is a `RenewedChannel`.

    Args:
        address: host:port.
        role: Who is expected there; a certificate of anybody else is refused, wherever it is.
        options: Of gRPC.
    """
    certificates = ours()
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return _secure(address, role, options, certificates.fresh(), certificates.domain)


def _secure(
    address: str, role: Role, options: Options, loaded: Loaded, domain: str
) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.certificate)
    name = ("grpc.ssl_target_name_override", server_name(role, domain))
    return grpc.aio.secure_channel(address, credentials, options=(*options, name))


class RenewedChannel:
    """A channel for a long time: another one when the certificate has been replaced.

    gRPC connects again by itself, but always with the certificate that the channel was made with.
    """

    def __init__(self, address: str, role: Role, *, options: Options) -> None:
        """See `channel_to`."""
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
        """Return the channel for the next call; calls that are under way on others go on.

        Of the one before the last they have `_GRACE_S`: a certificate and its CA may be replaced
        one shortly after the other.
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
    """Return a server for our processes; `add_port` makes it listen."""
    certificates = ours()
    checks = () if certificates is None else (_Callers(certificates),)
    return grpc.aio.server(options=options, interceptors=checks)


def add_port(serving: grpc.aio.Server, address: str) -> int:
    """Listen at host:port, and return the port.

    Raises:
        RuntimeError: The address is taken.
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
        """Return what the next connection uses; None: what the last one did. In any thread."""
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
    """Lets only those call a service whose certificate is of a role that may."""

    def __init__(self, certificates: Certificates) -> None:
        self._domain = certificates.domain

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method with the check before it; all of ours are coroutines."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service = str(handler_call_details.method).strip("/").rpartition("/")[0]
        make, method = next(
            (make, method) for name, make in _MAKERS if (method := getattr(handler, name))
        )

        async def checked(request: object, context: _Context) -> object:
            await self._check(service, context)
            return await method(request, context)

        return make(checked, handler.request_deserializer, handler.response_serializer)

    async def _check(self, service: str, context: _Context) -> None:
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
