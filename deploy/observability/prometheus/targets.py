"""Writes what Prometheus is to scrape of a local stack that runs.

`python deploy/observability/prometheus/targets.py [FOLDER]`, beside prometheus.yml by default. It
reads the stack's home ($SLUICE_HOME, default .sluice) and asks the admin REST where the engines
are. Run it again when replicas have come or gone; Prometheus sees changed files by itself.
"""  # noqa: INP001 - a script beside what it configures

import json
import os
import sys
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
    lines = (home / "env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    ports = json.loads((home / "ports.json").read_text())
    return {
        "gateway": [_group(urlsplit(env["OPENAI_BASE_URL"]).netloc)],
        "router": [_group(f"{_HOST}:{ports['router_http']}")],
        "agent": [_group(f"{_HOST}:{ports['agent_http']}")],
        "control-plane": [_group(urlsplit(env["SLUICE_ADMIN_URL"]).netloc)],
        "telemetry": [_group(f"{_HOST}:{ports['telemetry_http']}")],
        "engine": _engines(env["SLUICE_ADMIN_URL"], env["SLUICE_ADMIN_KEY"]),
    }


def _engines(url: str, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    query: dict[str, str] = {}
    while True:
        page = _ask(f"{url}/v1/replicas?{urlencode(query)}", key)
        for it in page["data"]:
            if it["metrics_address"]:  # none until its agent has started it
                labels = {"pool": it["pool_id"], "replica": it["id"]}
                found.append(_group(it["metrics_address"], **labels))
        if not page["has_more"]:
            return found
        query = {"after": page["data"][-1]["id"]}


def _ask(url: str, key: str) -> dict[str, Any]:
    asked = urllib.request.Request(  # noqa: S310 - our own admin REST
        url, headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the same
        return json.load(answer)


def _group(address: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": labels}


def main() -> None:
    """Write one file per job."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("targets")
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ.get("SLUICE_HOME") or ".sluice")
    for job, groups in targets(home).items():
        (folder / f"{job}.json").write_text(json.dumps(groups, indent=1) + "\n")


if __name__ == "__main__":
    main()
