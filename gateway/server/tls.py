"""TLS certificates, replaced without a restart."""

import ssl
from collections.abc import Sequence
from pathlib import Path

import structlog

from sluice.certificates import no_passphrase, shaken_hands

log = structlog.get_logger(__name__)


class TlsFiles:
    """A certificate chain and its key, in PEM files that may be replaced at any time.

    Attributes:
        context: Server context; new connections get the newest certificate, open connections keep
            the certificate that they began with.
        is_stale: Whether newer files exist that could not be used.
        expires_unix_s: Unix seconds of the end of the certificate in use; 0 while clients refuse
            it.
    """

    def __init__(self, cert: Path, key: Path, *, versions: Sequence[str] = ("http/1.1",)) -> None:
        """Load the files.

        Args:
            cert: Chain of certificates.
            key: Key of the first certificate in the chain.
            versions: ALPN names of the served HTTP versions, the preferred version first.

        Raises:
            OSError: A file cannot be read.
            ssl.SSLError: A file is no PEM, or the key does not fit the certificate.
        """
        self._files, self._spoken = (cert, key), list(versions)
        self._seen = self._versions()
        self.context = self._loaded()
        self.is_stale = False
        self._refusal = ""
        self.expires_unix_s = self._expires_unix_s(self.context)

    def reload_changed(self) -> None:
        """Load the files again if they have changed; log unusable files and keep the old ones."""
        try:
            versions = self._versions()
            if versions == self._seen:
                self.is_stale = False
                if not self.expires_unix_s:  # it may have been too early
                    self.expires_unix_s = self._expires_unix_s(self.context)
                return
            # Loaded into another context first, because a bad pair would break the one in use.
            expires_unix_s = self._expires_unix_s(self._loaded())
            self.context.load_cert_chain(*self._files, password=no_passphrase)
        except (OSError, ssl.SSLError) as error:  # perhaps half replaced; the next poll retries
            self.is_stale = True
            log.warning("certificate_not_loaded", error=str(error))
        else:
            self._seen = versions
            self.is_stale = False
            self.expires_unix_s = expires_unix_s
            log.info("certificate_loaded", file=str(self._files[0]))

    def left_s(self, now_unix_s: float) -> float:
        """Return the seconds until clients refuse the certificate in use."""
        return max(0.0, self.expires_unix_s - now_unix_s)

    def _versions(self) -> list[tuple[int, int, int]]:
        found = [file.stat() for file in self._files]
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found]

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(self._spoken)
        context.load_cert_chain(*self._files, password=no_passphrase)
        return context

    def _expires_unix_s(self, server: ssl.SSLContext) -> float:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False  # clients may use names that the server does not know
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as if they knew its issuer
        client.load_verify_locations(self._files[0])
        try:
            seen, _ = shaken_hands(client, server)
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or str(error)
            if reason != self._refusal:
                log.warning("certificate_refused", reason=reason)
            self._refusal = reason
            return 0.0
        self._refusal = ""
        return float(ssl.cert_time_to_seconds(seen["notAfter"]))
