"""`python -m telemetry`: request events from the broker into ClickHouse, and queries on them."""

import sys

import uvloop

from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs
from telemetry.app import run
from telemetry.settings import Settings


async def _main(settings: Settings) -> None:
    async with stop_signals() as stop:
        await run(settings, stop)


def main() -> None:
    """Run the service until SIGTERM."""
    settings = Settings.from_environment()
    configure_logs("telemetry")
    try:
        uvloop.run(_main(settings))
    except OSError as error:
        sys.exit(f"TELEMETRY__HTTP_ADDRESS {settings.http_address} cannot be used: {error}")


if __name__ == "__main__":
    main()
