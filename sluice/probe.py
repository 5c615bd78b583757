"""`python -m sluice.probe` queries the readiness of this container's process, for health checks.

The program reads the address from the environment, like the process itself, so that no health check
repeats the address. It needs only the standard library, because a check runs every few seconds.
"""

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

from sluice.addresses import host_and_port

TIMEOUT_S = 3.0
# The operations address is first, because there a gateway with workers reports for all workers.
_NAMES = (
    "GATEWAY__OPS_ADDRESS",
    "GATEWAY__HTTP_ADDRESS",
    "ROUTER__HTTP_ADDRESS",
    "AGENT__HTTP_ADDRESS",
    "CONTROL_PLANE__HTTP_ADDRESS",
    "TELEMETRY__HTTP_ADDRESS",
)
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def target(environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Return host, port and whether the port uses TLS.

    Raises:
        LookupError: No service is configured.
    """
    name = next((name for name in _NAMES if environment.get(name)), "")
    if not name:
        raise LookupError(f"set one of {', '.join(_NAMES)}")
    host, port = host_and_port(environment[name])
    certificate = "GATEWAY__TLS_CERT" if name == "GATEWAY__HTTP_ADDRESS" else "MTLS__CERTIFICATE"
    is_tls = bool(environment.get(certificate))
    return _LOOPBACK.get(host, host), port, is_tls


def main() -> int:
    """Return 0 if `/readyz` answers 200, or else print the reason on stderr and return 1."""
    try:
        host, port, is_tls = target(os.environ)
        # The check runs on the same machine, and the name in the certificate is the public name.
        context = ssl._create_unverified_context() if is_tls else None  # noqa: S323, SLF001  # pyright: ignore[reportPrivateUsage]
        link = (
            http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
            if is_tls
            else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        )
        link.request("GET", "/readyz")
        answer = link.getresponse()
        if answer.status == http.client.OK:
            return 0
        reason = f"{answer.status} {answer.read(500).decode(errors='replace')}"
    except (OSError, LookupError, ValueError, http.client.HTTPException) as error:
        reason = f"{type(error).__name__}: {error}"
    sys.stderr.write(f"not ready: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
