"""The expiry of this process's mTLS certificate, as a metric for alerts."""

import time
from collections.abc import Iterable
from math import inf

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sluice.certificates import ours


class CertificateExpiry(Collector):
    """The gauge of the certificate in use, even if the files contain a newer certificate."""

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauge, infinite without mutual TLS, so that alerts always find the metric."""
        certificates = ours()
        left_s = inf if certificates is None else certificates.fresh().expires_unix_s - time.time()
        yield GaugeMetricFamily(
            "mtls_certificate_expiry_seconds",
            "Until the certificate for mutual TLS ends; infinite without mutual TLS",
            value=left_s,
        )
