"""`.env` of docker-compose.yml: every secret is made here, none has a default.

Standard library only, so that `python3 -m cli.compose_env` works in a fresh checkout.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from cli.stack.home import Home, parse_env, render_env, write_atomic
from sluice.ids import new_secret

ENV_FILE = Path(".env")
CONTEXT = "compose"
_SECRETS = {
    "POSTGRES_PASSWORD": "postgres",
    "VALKEY_PASSWORD": "valkey",
    "CLICKHOUSE_PASSWORD": "traces",
    "OBJECTS_ACCESS_KEY": "objects",
    "OBJECTS_SECRET_KEY": "objects",
    "GRAFANA_PASSWORD": "grafana",
    "SLUICE_ADMIN_KEY": "sk-sluice-admin",
}
# What a person may want to change, with what is taken when it is left alone.
PLAIN = {
    "COMPOSE_PROFILES": "observability",
    "GATEWAY_PORT": "8000",
    "ADMIN_PORT": "8001",
    "TELEMETRY_PORT": "8002",
    "FRONT_PORT": "8010",
    "GRAFANA_PORT": "3000",
    "PROMETHEUS_PORT": "9090",
}


def completed(known: Mapping[str, str]) -> dict[str, str]:
    """Return `known` with all that was missing; existing values stay, whatever they are.

    The digest of the admin key follows the key: services get the digest, never the key.
    """
    made = {name: known.get(name) or new_secret(prefix) for name, prefix in _SECRETS.items()}
    plain = {name: known.get(name, value) for name, value in PLAIN.items()}
    digest = hashlib.sha256(made["SLUICE_ADMIN_KEY"].encode()).hexdigest()
    return {**known, **made, **plain, "SLUICE_ADMIN_KEY_SHA256": digest}


def client_env(values: Mapping[str, str]) -> dict[str, str]:
    """Return what `sluice --context compose` needs: addresses on this machine, and the key."""
    return {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{values['GATEWAY_PORT']}/v1",
        "SLUICE_ADMIN_URL": f"http://127.0.0.1:{values['ADMIN_PORT']}",
        "SLUICE_ADMIN_KEY": values["SLUICE_ADMIN_KEY"],
        "SLUICE_TELEMETRY_URL": f"http://127.0.0.1:{values['TELEMETRY_PORT']}",
    }


def write(file: Path, home: Home) -> list[str]:
    """Complete the file and write the context; return the names that were added.

    Raises:
        OSError: One of them cannot be written.
    """
    known = parse_env(file.read_text()) if file.exists() else {}
    values = completed(known)
    if values != known:
        filled = {name: value for name, value in values.items() if value}
        empty = "".join(f"{name}=\n" for name, value in values.items() if not value)
        write_atomic(file, render_env(filled) + empty, mode=0o600)
    write_atomic(home.context_file(CONTEXT), render_env(client_env(values)), mode=0o600)
    return sorted(name for name, value in values.items() if known.get(name) != value)


def main() -> None:
    """Write both files, for who has no `sluice` yet."""
    added = write(ENV_FILE, Home.find())
    sys.stdout.write(f"{ENV_FILE}: {', '.join(added) or 'nothing was missing'}\n")


if __name__ == "__main__":
    main()
