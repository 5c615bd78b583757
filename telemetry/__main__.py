"""`python -m telemetry`: writes the broker's request events to ClickHouse, and answers queries."""

import sys

import uvloop

from sluice import certificates, kafka, shared_secret
from sluice.identity import CertificateRole
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs
from telemetry.app import run
from telemetry.costs.prices import Prices, PricesError, read_prices
from telemetry.settings import Settings


async def _main(settings: Settings, prices: Prices | None) -> None:
    async with stop_signals() as stop:
        await run(settings, stop, prices)


def main() -> None:
    """Run the service until SIGTERM."""
    settings = Settings.from_environment()
    try:
        prices = read_prices(settings.prices_file) if settings.prices_file else None
    except PricesError as error:
        sys.stderr.write(f"TELEMETRY__PRICES_FILE {error}\n")
        sys.exit(2)
    if prices and prices.recorded_pools and not settings.control_plane_url:
        sys.stderr.write(
            f"TELEMETRY__PRICES_FILE {settings.prices_file}: pools.{prices.recorded_pools[0]}:"
            " add replicas, or set TELEMETRY__CONTROL_PLANE_URL to ask for recorded hours\n"
        )
        sys.exit(2)
    configure_logs("telemetry")
    called = {"TELEMETRY__CONTROL_PLANE_URL": settings.control_plane_url}
    certificates.use(CertificateRole.TELEMETRY, called)
    shared_secret.use()
    if found := list(kafka.problems(settings.kafka_bootstrap)):
        sys.stderr.write("\n".join(found) + "\n")
        sys.exit(2)
    try:
        uvloop.run(_main(settings, prices))
    except OSError as error:
        sys.exit(f"TELEMETRY__HTTP_ADDRESS {settings.http_address} cannot be used: {error}")


if __name__ == "__main__":
    main()
