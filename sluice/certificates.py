"""Certificate files and TLS contexts of mutual TLS between platform processes, which is optional.

A process has one certificate, as client and as server. The certificate is set once, at the start,
and every connection and listener of the process uses it. The files are checked again with each new
connection, so that replaced files need neither a restart nor a loop.
"""

import asyncio
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sluice.identity import (
    DOMAIN,
    CertificateRole,
    Identity,
    allowed,
    identity_of,
    refusal,
    server_name,
)
from sluice.settings import ServiceSettings

log = structlog.get_logger(__name__)

# Seconds until refused files are loaded again, because the cause may have been a wrong clock or a
# lack of file descriptors.
_RETRY_S = 30.0
_FLIGHTS_MAX = 10  # most message rounds of a test handshake, of which TLS 1.3 needs three

Versions = tuple[tuple[str, int, int, int], ...]


class MtlsSettings(ServiceSettings):
    """Mutual TLS between the processes of the platform, which is off without settings.

    Attributes:
        ca: PEM file of the CAs that sign our processes' certificates, or a directory of such files
            (*.pem, *.crt).
        certificate: PEM file of this process's certificate and of intermediate CAs. The certificate
            has the DNS name `role.domain`, for example `router.sluice.internal`. An agent's
            certificate also has `engine.domain`.
        key: PEM file of the certificate's key. All files are read again when they change.
        engine_ca: For agents, PEM file of the CA that signs the allowed callers of engines. Triton
            checks no role, so without this setting any certificate of the platform may call.
        domain: End of the DNS names, which differs between platforms that share a CA.
    """

    model_config = SettingsConfigDict(env_prefix="MTLS__")

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    engine_ca: Path | None = None
    domain: str = Field(default=DOMAIN, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=200)

    @property
    def is_on(self) -> bool:
        """Whether any file is set."""
        return any((self.ca, self.certificate, self.key, self.engine_ca))


class CertificateError(ValueError):
    """Raised for unusable certificates, with a message that names the setting and the fix."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The contents of the certificate files, which match and are valid now.

    Attributes:
        expires_unix_s: Unix time at which the certificate expires, in seconds.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    identity: Identity
    expires_unix_s: float
    versions: Versions
    accepting: ssl.SSLContext  # accepts clients with or without a certificate
    requiring: ssl.SSLContext  # refuses clients without a certificate
    calling: ssl.SSLContext


class Certificates:
    """The certificate of this process, reloaded when its files change. Thread-safe."""

    def __init__(self, settings: MtlsSettings) -> None:
        """Load and check the files.

        Raises:
            CertificateError: Files are missing, or do not match.
        """
        lacking = [
            f"MTLS__{name.upper()}"
            for name in ("ca", "certificate", "key")
            if getattr(settings, name) is None
        ]
        if lacking:
            raise CertificateError(
                f"{', '.join(lacking)}: mutual TLS needs MTLS__CA, MTLS__CERTIFICATE and MTLS__KEY;"
                " set all three, or none; `sluice certificates create` makes such files"
            )
        assert settings.ca is not None
        assert settings.certificate is not None
        assert settings.key is not None
        self.domain = settings.domain
        self.engine_ca = settings.engine_ca
        self.certificate_file = settings.certificate
        self.key_file = settings.key
        self._ca_path = settings.ca
        self._lock = threading.Lock()
        self._refused: Versions | None = None
        self._retry_at_s = 0.0  # time by `time.monotonic`
        self._loaded = self._load()
        if self.engine_ca is not None:
            _read("MTLS__ENGINE_CA", self.engine_ca)
        self._servers = {
            is_required: self._renewing(is_required=is_required) for is_required in (False, True)
        }

    def engine_callers(self) -> bytes:
        """Return the CAs of permitted callers of engines, in PEM."""
        if self.engine_ca is None:
            return self.fresh().ca
        return _read("MTLS__ENGINE_CA", self.engine_ca)

    def fresh(self) -> Loaded:
        """Return the contents of the files, or the last valid contents if these are unusable."""
        with self._lock:
            versions: Versions = ()
            try:
                versions = self._versions()
                is_refused = versions == self._refused and time.monotonic() < self._retry_at_s
                if is_refused or versions == self._loaded.versions:
                    return self._loaded
                self._loaded = self._load()
            except (CertificateError, OSError) as error:  # half replaced files are loaded later
                if versions != self._refused:
                    log.warning("certificate_not_loaded", error=str(error))
                self._refused, self._retry_at_s = versions, time.monotonic() + _RETRY_S
            else:
                self._refused = None
                log.info("certificate_loaded", names=list(self._loaded.identity.names))
            return self._loaded

    def server_context(self, *, is_required: bool) -> ssl.SSLContext:
        """Return a TLS context for servers, which uses the newest files for each connection.

        Args:
            is_required: Whether clients need a certificate. If not, a certificate that is sent must
                still be valid.
        """
        return self._servers[is_required]

    def client_context(self) -> ssl.SSLContext:
        """Return a context with the newest files for one connection of a client."""
        return self.fresh().calling

    def identity(self, names: Mapping[str, Any] | None) -> Identity:
        """Return the identity of a peer.

        Args:
            names: Names in the certificate, from `SSLObject.getpeercert`.
        """
        listed = (names or {}).get("subjectAltName", ())
        return identity_of((name for kind, name in listed if kind == "DNS"), self.domain)

    def _renewing(self, *, is_required: bool) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER, is_required=is_required)

        def renew(link: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            now = self.fresh()
            link.context = now.requiring if is_required else now.accepting

        context.sni_callback = renew  # also called for clients without a server name
        return context

    def _context(self, protocol: int, *, is_required: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
            context.set_alpn_protocols(["http/1.1"])
            # Session tickets are disabled, because a resumed session is not verified again.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        for file in _ca_files(self._ca_path):
            try:
                context.load_verify_locations(file)
            except (OSError, ssl.SSLError) as error:
                raise CertificateError(
                    f"MTLS__CA: {file} holds no certificate that can be read ({error}); name the"
                    " PEM file of the CA that signs our processes' certificates"
                ) from None
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, password=no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise CertificateError(
                f"MTLS__CERTIFICATE, MTLS__KEY: {self.certificate_file} and {self.key_file} cannot"
                f" be used together ({error}); name PEM files of a certificate and the key that it"
                " was made for"
            ) from None
        return context

    def _versions(self) -> Versions:
        files = (*_ca_files(self._ca_path), self.certificate_file, self.key_file)
        stats = [(str(file), file.stat()) for file in files]
        return tuple((name, it.st_mtime_ns, it.st_ino, it.st_size) for name, it in stats)

    def _load(self) -> Loaded:
        ca = b"\n".join(_read("MTLS__CA", file) for file in _ca_files(self._ca_path))
        certificate = _read("MTLS__CERTIFICATE", self.certificate_file)
        key = _read("MTLS__KEY", self.key_file)
        before = self._versions()
        accepting = self._context(ssl.PROTOCOL_TLS_SERVER, is_required=False)
        requiring = self._context(ssl.PROTOCOL_TLS_SERVER, is_required=True)
        calling = self._context(ssl.PROTOCOL_TLS_CLIENT, is_required=True)
        seen = self._seen_by_itself(requiring)
        identity = self.identity(seen)
        if not identity.roles:
            wanted = server_name(CertificateRole.ROUTER, self.domain)
            raise CertificateError(
                f"MTLS__CERTIFICATE: {self.certificate_file} has the DNS names"
                f" {', '.join(identity.names) or '(none)'}, and none of a role, such as {wanted};"
                " have one made with such a name, or set MTLS__DOMAIN"
            )
        unchanged = (
            before == self._versions()
            and key == _read("MTLS__KEY", self.key_file)
            and certificate == _read("MTLS__CERTIFICATE", self.certificate_file)
        )
        if not unchanged:
            raise CertificateError("MTLS__*: the files are being replaced; start again")
        expires = float(ssl.cert_time_to_seconds(seen["notAfter"]))
        return Loaded(
            ca, certificate, key, identity, expires, before, accepting, requiring, calling
        )

    def _seen_by_itself(self, server: ssl.SSLContext) -> dict[str, Any]:
        """Return the fields of the certificate that a peer receives in a handshake.

        Raises:
            CertificateError: A peer would refuse the certificate.
        """
        client = self._context(ssl.PROTOCOL_TLS_CLIENT, is_required=True)
        client.check_hostname = False  # the names are checked afterwards
        try:
            _, seen = shaken_hands(client, server)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or str(error)
            raise CertificateError(
                f"MTLS__CERTIFICATE: our peers would refuse {self.certificate_file}: {why}; have a"
                f" new one signed, for client and server, by a CA of MTLS__CA ({self._ca_path})"
            ) from None
        return seen


def shaken_hands(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Perform a TLS handshake in memory, and return the certificates that both sides receive.

    Raises:
        ssl.SSLError: A side refuses the other's certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_FLIGHTS_MAX):
        is_over = [_is_done(side) for side in sides]
        if all(is_over):
            break
    by_client, by_server = (dict(side.getpeercert() or {}) for side in sides)
    return by_client, by_server


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _ca_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in {".pem", ".crt"})
    if not files:
        raise CertificateError(f"MTLS__CA: {path} holds no *.pem and no *.crt; put the CAs there")
    return files


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{setting}: {error}; name a file that this process may read"
        ) from None


class _Ours:
    """The certificates of this process, or None without TLS between processes."""

    certificates: Certificates | None = None


def no_passphrase() -> str:
    """Raise SSLError, so that `load_cert_chain` with this `password` never prompts a terminal."""
    raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the key has a passphrase; give a key without one")


def use(role: CertificateRole | None = None, called: Mapping[str, str] | None = None) -> None:
    """Set this process's certificates from the environment.

    Unusable certificates end the process with status 2 and a line on stderr.

    Args:
        role: Role of this process, or None for any role.
        called: URLs of platform processes that this process calls, by setting.
    """
    settings = MtlsSettings.from_environment()
    if not settings.is_on:
        return
    try:
        install(Certificates(settings), role)
        _check_https(called or {})
    except CertificateError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


def _check_https(called: Mapping[str, str]) -> None:
    for setting, url in called.items():
        if url and not url.lower().startswith("https://"):
            raise CertificateError(
                f"{setting}: {url} would be called in clear, with a key, although mutual TLS is on;"
                f" set https://{url.partition('://')[2]}"
            )


def install(certificates: Certificates | None, role: CertificateRole | None = None) -> None:
    """Set this process's certificates.

    Raises:
        CertificateError: The certificates are not for this role.
    """
    if certificates is not None and role is not None:
        # A process that starts engines provides them with its own certificate.
        wanted = (
            {CertificateRole.AGENT, CertificateRole.ENGINE}
            if role is CertificateRole.AGENT
            else {role}
        )
        identity = certificates.fresh().identity
        if not identity.roles.issuperset(wanted):
            names = " and ".join(server_name(one, certificates.domain) for one in sorted(wanted))
            raise CertificateError(
                f"MTLS__CERTIFICATE: {certificates.certificate_file} is of {identity}, and this"
                f" process is called {names}; name the file that was made for it"
            )
    _Ours.certificates = certificates


def ours() -> Certificates | None:
    """Return this process's certificates, or None without mutual TLS."""
    return _Ours.certificates


def refusal_of(transport: asyncio.BaseTransport | None, service: str) -> str:
    """Return why the peer may not call a service over HTTP, or an empty string.

    Args:
        transport: Transport of the connection. Without mutual TLS, every peer may call.
        service: Called service.
    """
    certificates = _Ours.certificates
    if certificates is None:
        return ""
    shown = transport.get_extra_info("peercert") if transport is not None else None
    identity = certificates.identity(shown)
    if allowed(identity, service):
        return ""
    why = refusal(identity, service, certificates.domain)
    log.warning("caller_refused", identity=str(identity), reason=why)
    return why


def server_tls(*, is_required: bool) -> ssl.SSLContext | None:
    """Return the `ssl` argument of HTTP servers, from `Certificates.server_context`."""
    certificates = _Ours.certificates
    return certificates and certificates.server_context(is_required=is_required)


def http_options(role: CertificateRole) -> dict[str, Any]:
    """Return aiohttp's TLS options for a request to a platform process.

    Args:
        role: Role that the peer's certificate must have, at any address.
    """
    if _Ours.certificates is None:
        return {}
    return {
        "ssl": _Ours.certificates.client_context(),
        "server_hostname": server_name(role, _Ours.certificates.domain),
    }
