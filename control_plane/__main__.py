"""`python -m control_plane`: the service."""

import gc
import sys

import uvloop

from control_plane.app import run
from control_plane.settings import Settings
from sluice import certificates, shared_secret
from sluice.identity import CertificateRole
from sluice.logs import configure_logs

# A full collection looks at every object of the state, while hundreds of watchers wait: it may
# come seldom, because requests and changes make few cycles.
_GC_THRESHOLDS = (10_000, 20, 100)


def main() -> None:
    """Serve until stopped; status 1 and one line when an address is taken."""
    configure_logs("control-plane")
    settings = Settings.from_environment()
    called = {"CONTROL_PLANE__TELEMETRY_URL": settings.telemetry_url}
    certificates.use(CertificateRole.CONTROL_PLANE, called)
    shared_secret.use()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    problems: list[BaseException] = []
    try:
        uvloop.run(run(settings))
    except* OSError as errors:
        problems += errors.exceptions
    if problems:
        sys.stderr.write(f"the control plane could not run: {problems[0]}\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
