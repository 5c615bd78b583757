"""Writes `.env` for docker-compose.yml, with generated secrets and no default for any of them.

This module uses only the standard library, so that `python3 -m cli.compose_env` works in a fresh
checkout.
"""

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from cli.stack.home import Home, render_env, write_atomic
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
    "INSTALLATION_SECRET": "installation",
}
# Variables that an operator may want to change, with their defaults.
PLAIN = {
    "COMPOSE_PROFILES": "observability",
    "GATEWAY_PORT": "8000",
    "ADMIN_PORT": "8001",
    "TELEMETRY_PORT": "8002",
    "FRONT_PORT": "8010",
    "GRAFANA_PORT": "3000",
    "PROMETHEUS_PORT": "9090",
}

# A line in Compose's syntax, in which the value may be quoted and followed by a comment.
_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>\w+)\s*=\s*"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<plain>[^"'\s#][^"']*?|))(?:\s+\#.*)?\s*"""
)
# Characters that a generated value must not have, because shells, Compose or URLs interpret them.
_SPECIAL = re.compile(r"""[\s'"$`\\;&|<>()]""")
_SPECIAL_IN_URLS = re.compile(r"[@:/?#%\[\]]")


def completed(known: Mapping[str, str]) -> dict[str, str]:
    """Return `known` with all missing variables added and its own values unchanged.

    The digest is derived from the admin key. Control plane and telemetry verify callers by the
    digest. Callers use the key itself. They are both services, `bootstrap` and `targets`.
    """
    made = {name: known.get(name) or new_secret(prefix) for name, prefix in _SECRETS.items()}
    plain = {name: known.get(name, value) for name, value in PLAIN.items()}
    digest = hashlib.sha256(made["SLUICE_ADMIN_KEY"].encode()).hexdigest()
    return {**known, **made, **plain, "SLUICE_ADMIN_KEY_SHA256": digest}


def client_env(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `sluice --context compose`, local addresses and the admin key."""
    return {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{values['GATEWAY_PORT']}/v1",
        "SLUICE_ADMIN_URL": f"http://127.0.0.1:{values['ADMIN_PORT']}",
        "SLUICE_ADMIN_KEY": values["SLUICE_ADMIN_KEY"],
        "SLUICE_TELEMETRY_URL": f"http://127.0.0.1:{values['TELEMETRY_PORT']}",
    }


def parsed(text: str) -> dict[str, str]:
    """Return the variables that Compose reads from the file.

    Raises:
        ValueError: A line is not NAME=VALUE, or Compose would misread a value. The message names
            the line or the variable, never a value.
    """
    known: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} is not NAME=VALUE on one line: correct it")
        known[found["name"]] = found["quoted"] if found["quote"] else found["plain"]
    for name in known.keys() & {*_SECRETS, *PLAIN}:
        in_url = name in ("POSTGRES_PASSWORD", "VALKEY_PASSWORD")
        if _SPECIAL.search(known[name]) or (in_url and _SPECIAL_IN_URLS.search(known[name])):
            raise ValueError(f"{name} may have letters, digits and . _ ~ - only: choose another")
    return known


def amended(text: str, changes: Mapping[str, str]) -> str:
    """Return the text with these variables changed in their lines, or appended at the end."""
    for name, value in changes.items():
        line = f"{name}={value}\n"
        text, count = re.subn(
            rf"^[ \t]*(?:export[ \t]+)?{name}[ \t]*=.*\n?", line, text, flags=re.MULTILINE
        )
        if not count:
            text += ("" if not text or text.endswith("\n") else "\n") + line
    return text


def write(file: Path, home: Home) -> list[str]:
    """Complete the file, write the context, and return the names of the added variables.

    Correct lines and comments stay unchanged.

    Raises:
        OSError: A file cannot be written.
        ValueError: Compose could not read the file, which is left unchanged.
    """
    text = file.read_text() if file.exists() else ""
    known = parsed(text)
    values = completed(known)
    context = render_env(client_env(values))
    changes = {name: value for name, value in values.items() if known.get(name) != value}
    if changes:
        write_atomic(file, amended(text, changes), mode=0o600)
    write_atomic(home.context_file(CONTEXT), context, mode=0o600)
    return sorted(changes)


def main() -> None:
    """Write both files on machines without the `sluice` command."""
    try:
        added = write(ENV_FILE, Home.find())
    except ValueError as error:
        sys.exit(f"{ENV_FILE}: {error}")
    sys.stdout.write(f"{ENV_FILE}: {', '.join(added) or 'nothing was missing'}\n")


if __name__ == "__main__":
    main()
