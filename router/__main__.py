"""Entry point of the router, `python -m router`."""

import gc

import uvloop

from router.settings import Settings
from sluice import certificates, shared_secret
from sluice.grpc_polling import poll_in_place
from sluice.identity import CertificateRole
from sluice.logs import configure_logs


def main() -> None:
    """Run one router."""
    settings = Settings.from_environment()
    configure_logs("router")
    poll_in_place()
    certificates.use(CertificateRole.ROUTER)
    shared_secret.use()
    from router.app import serve

    # Objects that exist now are never freed, so they are exempt from garbage collection.
    # Reference counting frees requests, so the collector finds almost nothing, and runs rarely.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    try:
        uvloop.run(serve(settings))
    except OSError as error:
        message = f"{error}; check ROUTER__HTTP_ADDRESS and ROUTER__STATE_DIR"
        raise SystemExit(message) from None


if __name__ == "__main__":
    main()
