"""Entry point of the service, run by `python -m control_plane`."""

import gc
import sys

import uvloop

from control_plane.app import run
from control_plane.settings import Settings
from sluice import certificates, shared_secret
from sluice.identity import CertificateRole
from sluice.logs import configure_logs

# A full garbage collection visits every object of the state and delays hundreds of watchers. A rare
# collection is enough, because requests and changes create few reference cycles.
_GC_THRESHOLDS = (10_000, 20, 100)


def main() -> None:
    """Serve until stopped. Exit with status 1 and one line of text if an address is in use."""
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
