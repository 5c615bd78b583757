"""The server of one worker's public address: HTTP/1.1, HTTP/2 and TLS."""

from gateway.http2.server import Http2Server
from gateway.server.answer_counts import AnswerCounts
from gateway.server.bounds import ServerLimits
from gateway.server.cors import Cors
from gateway.server.middleware import Envelope
from gateway.server.routes import Routes
from gateway.server.runner import HttpRunner
from gateway.server.tls import TlsFiles
from gateway.settings import GatewaySettings


class PublicServer:
    """The server for clients and probes.

    Attributes:
        runner: Starts and stops the server.
        http2: The server's HTTP/2 connections, or None if HTTP/2 is off.
        tls: The server's certificate, or None without TLS.
    """

    def __init__(self, settings: GatewaySettings, routes: Routes, counts: AnswerCounts) -> None:
        """Create the server, which does not listen yet."""
        envelope = Envelope(
            routes, counts, trace_share=settings.trace_share, cors=Cors(settings.origins)
        )
        limits = ServerLimits(
            connections_max=settings.connections_max,
            head_timeout_s=settings.head_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
            body_bytes_max=settings.body_buffer_bytes,
        )
        self.runner = HttpRunner(envelope, limits, envelope.note_malformed)
        self.http2: Http2Server | None = None
        if settings.http2:
            self.http2 = Http2Server(self.runner.server, limits, settings.http2_streams_max)
        self.tls = _tls_files(settings)

    @property
    def parts(self) -> tuple[HttpRunner, TlsFiles | None, Http2Server | None]:
        """The server's runner, certificate and HTTP/2 connections."""
        return self.runner, self.tls, self.http2


def _tls_files(settings: GatewaySettings) -> TlsFiles | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    versions = ("h2", "http/1.1") if settings.http2 else ("http/1.1",)
    return TlsFiles(settings.tls_cert, settings.tls_key, versions=versions)
