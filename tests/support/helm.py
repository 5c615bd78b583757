"""Renders the chart with Helm 4, in a process of its own: Helm's Go runtime stays out of the tests."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sluice"
IS_THERE = find_spec("helm_python") is not None
_DEADLINE_S = 120.0
Values = dict[str, Any]


@dataclass(frozen=True)
class RenderedChart:
    """The objects that Helm renders from values.

    Attributes:
        objects: Its objects; empty after a problem.
        notes: The text for the person who installed.
        problem: The reason of a refusal; empty: there is none.
    """

    objects: tuple[dict[str, Any], ...]
    notes: str
    problem: str


def merged(first: Values, second: Values) -> Values:
    """Return values as Helm lays one file over another."""
    found = dict(first)
    for key, value in second.items():
        mine = found.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = merged(cast("Values", mine), cast("Values", value))
        else:
            found[key] = value
    return found


def values_of(overlay: str) -> Values:
    """Return the values of one of kustomize's overlays; those of production are the chart's own."""
    file = CHART / f"values-{overlay}.yaml"
    return yaml.safe_load(file.read_text()) if overlay != "production" else {}


def charts(given: Sequence[Values]) -> list[RenderedChart]:
    """Render the chart once for each of the values, all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    return [
        RenderedChart(
            tuple(
                it
                for text in one["files"].values()
                for it in yaml.safe_load_all(text)
                if it is not None
            ),
            one["notes"],
            one["problem"],
        )
        for one in json.loads(done.stdout)
    ]


def main() -> None:
    """Render in this process: values come as JSON, files go as JSON."""
    import helm_python as helm

    found: list[dict[str, Any]] = []
    with helm.Chart.load(str(CHART)) as chart:
        for values in json.load(sys.stdin):
            try:
                chart.validate_schema(chart.merge_values(values))
                files = chart.render(values, name="sluice", namespace="sluice")
            except helm.HelmError as error:
                found.append({"files": {}, "notes": "", "problem": str(error)})
                continue
            notes = [text for name, text in files.items() if name.endswith("NOTES.txt")]
            objects = {name: text for name, text in files.items() if name.endswith(".yaml")}
            found.append({"files": objects, "notes": "".join(notes), "problem": ""})
    json.dump(found, sys.stdout)
