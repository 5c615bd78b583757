"""Writes benchmark results, one JSON file each, with the commit and the machine."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write_result(name: str, operation: str, figures: dict[str, Any]) -> Path:
    """Write `results/<name>.json` and return its path.

    Args:
        name: File name without suffix.
        operation: Text that defines one operation, and names the costs that are not measured.
        figures: The measurements, with their parameters.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "operation": operation,
        "commit": commit,
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_average": [round(x, 1) for x in os.getloadavg()],
        },
        **figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
