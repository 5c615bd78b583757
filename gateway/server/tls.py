"""TLS certificates that can be replaced without a restart."""

import ssl
from collections.abc import Sequence
from pathlib import Path

import structlog

from sluice.certificates import no_passphrase, shaken_hands

log = structlog.get_logger(__name__)


class TlsFiles:
    """A certificate chain and its key, in PEM files that may be replaced at any time.

    Attributes:
        context: Server context. New connections use the newest certificate, and open connections
            continue with the certificate that they began with.
        is_stale: Whether newer files exist that could not be used.
        expires_unix_s: Unix seconds of the end of the certificate in use, or 0 while clients would
            refuse it.
    """

    def __init__(self, cert: Path, key: Path, *, versions: Sequence[str] = ("http/1.1",)) -> None:
        """Load the files.

        Args:
            cert: Chain of certificates.
            key: Key of the first certificate in the chain.
            versions: ALPN names of the served HTTP versions, the preferred version first.

        Raises:
            OSError: A file cannot be read.
            ssl.SSLError: A file is no PEM, or key and certificate do not match.
        """
        self._files, self._spoken = (cert, key), list(versions)
        self._seen = self._versions()
        self.context = self._loaded()
        self.is_stale = False
        self._refusal = ""
        self.expires_unix_s = self._expires_unix_s(self.context)

    def reload_changed(self) -> None:
        """Load changed files again. Unusable files are logged, and the old ones stay in use."""
        try:
            versions = self._versions()
            if versions == self._seen:
                self.is_stale = False
                if not self.expires_unix_s:  # the certificate may not have been valid yet
                    self.expires_unix_s = self._expires_unix_s(self.context)
                return
            # Loaded into another context first, because a bad pair would break the one in use.
            expires_unix_s = self._expires_unix_s(self._loaded())
            self.context.load_cert_chain(*self._files, password=no_passphrase)
        # perhaps only one file was replaced so far, so the next poll retries
        except (OSError, ssl.SSLError) as error:
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
        # Clients may use names that are not configured in the server.
        client.check_hostname = False
        # accepts the chain as if its issuer were a trusted CA
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
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
