"""Writes what Prometheus is to scrape of a local stack that runs.

`python deploy/observability/prometheus/targets.py [FOLDER]`, beside prometheus.yml by default. It
reads the stack's home ($SLUICE_HOME, default .sluice) and asks the admin REST where the engines
are. Run it again when replicas have come or gone; Prometheus sees changed files by itself.

With `--static FILE`, job to `host:port`s in JSON, the processes come from there (left out are names
that nobody knows), the admin REST from SLUICE_ADMIN_URL and SLUICE_ADMIN_KEY. With `--every S` it
goes on. docker-compose.yml uses both.

The key with which Prometheus reports alerts goes into `alert-key` beside the targets.
"""  # noqa: INP001 - a script beside what it configures

import argparse
import json
import os
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

_HOST = "127.0.0.1"
_TIMEOUT_S = 10.0


def targets(home: Path) -> dict[str, list[dict[str, Any]]]:
    """Return Prometheus' target groups by job.

    Raises:
        OSError: The stack does not run, or never did.
    """
    env = _env(home)
    ports = json.loads((home / "ports.json").read_text())
    return {
        "gateway": [_group(f"{_HOST}:{ports['gateway_ops']}")],
        "router": [_group(f"{_HOST}:{ports['router_http']}")],
        "agent": [_group(f"{_HOST}:{ports['agent_http']}")],
        "control-plane": [_group(urlsplit(env["SLUICE_ADMIN_URL"]).netloc)],
        "telemetry": [_group(f"{_HOST}:{ports['telemetry_http']}")],
        "engine": _engines(
            env["SLUICE_ADMIN_URL"], env["SLUICE_ADMIN_KEY"], env.get("SSL_CERT_FILE")
        ),
    }


def _env(home: Path) -> dict[str, str]:
    lines = (home / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def static_targets(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return target groups of processes that are where a file says, and of the engines.

    Raises:
        OSError: The file cannot be read, or the admin REST does not answer.
    """
    found = {
        job: [_group(address) for address in addresses if _is_known(address)]
        for job, addresses in json.loads(file.read_text()).items()
    }
    url, key = os.environ["SLUICE_ADMIN_URL"], os.environ["SLUICE_ADMIN_KEY"]
    return found | {"engine": _engines(url, key)}


def _is_known(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        return bool(socket.getaddrinfo(host, int(port)))
    except socket.gaierror:
        return False


def _engines(url: str, key: str, cafile: str | None = None) -> list[dict[str, Any]]:
    # Without a file OpenSSL takes $SSL_CERT_FILE, else the system's.
    trust = ssl.create_default_context(cafile=cafile) if url.startswith("https:") else None
    found: list[dict[str, Any]] = []
    query: dict[str, str] = {}
    while True:
        page = _ask(f"{url}/v1/replicas?{urlencode(query)}", key, trust)
        for it in page["data"]:
            if it["metrics_address"]:  # none until its agent has started it
                # The agent passes them on, below a path of the replica's.
                address, _, path = it["metrics_address"].partition("/")
                labels = {"pool": it["pool_id"], "replica": it["id"]}
                labels["__metrics_path__"] = f"/{path}/metrics"
                found.append(_group(address, **labels))
        if not page["has_more"]:
            return found
        query = {"after": page["data"][-1]["id"]}


def _ask(url: str, key: str, trust: ssl.SSLContext | None) -> dict[str, Any]:
    asked = urllib.request.Request(  # noqa: S310 - our own admin REST
        url, headers={"Authorization": f"Bearer {key}"}
    )
    answering = urllib.request.urlopen(  # noqa: S310 - the same
        asked, timeout=_TIMEOUT_S, context=trust
    )
    with answering as answer:
        return json.load(answer)


def _group(address: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": labels}


def write(folder: Path, groups: dict[str, list[dict[str, Any]]]) -> None:
    """Write one file per job; Prometheus never sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    for job, targets_of_job in groups.items():
        staging = folder / f".{job}"
        staging.write_text(json.dumps(targets_of_job, indent=1) + "\n")
        staging.replace(folder / f"{job}.json")


def write_key(folder: Path, key: str, *, is_shared: bool) -> None:
    """Write the key that Prometheus reports with; `is_shared`: it runs as another user."""
    staging = folder / ".alert-key"
    staging.unlink(missing_ok=True)
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    staging.chmod(0o644 if is_shared else 0o600)
    staging.replace(folder / "alert-key")


def main() -> None:
    """Write one file per job, once or again and again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).with_name("targets"))
    parser.add_argument("--static", type=Path, metavar="FILE")
    parser.add_argument("--every", type=float, default=0.0, metavar="S")
    given = parser.parse_args()
    home = Path(os.environ.get("SLUICE_HOME") or ".sluice")
    while True:
        try:
            write(given.folder, static_targets(given.static) if given.static else targets(home))
            key = os.environ["SLUICE_ADMIN_KEY"] if given.static else _env(home)["SLUICE_ADMIN_KEY"]
            write_key(given.folder, key, is_shared=bool(given.static))
        except OSError as error:
            if not given.every:
                raise
            sys.stderr.write(f"the targets stay as they are: {error}\n")
        if not given.every:
            return
        time.sleep(given.every)


if __name__ == "__main__":
    main()
