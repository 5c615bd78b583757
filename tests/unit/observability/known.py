"""What can be asked of a Prometheus that scrapes us: metrics, recorded series, and their labels."""

import json
from pathlib import Path
from typing import Any

from cli.reference import Declared, declared_metrics
from tests.support.yaml_files import read_yaml
from tests.unit.observability.promql import Names, names_in

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "observability" / "prometheus"
GRAFANA = ROOT / "deploy" / "observability" / "grafana"
# What Prometheus adds to every series, and prometheus.yml's targets to those of engines.
TARGET_LABELS = {"job", "instance"}
ENGINE_LABELS = {"pool", "replica", "model", "version"}
# What gpus.yml reads of dcgm-exporter, and the labels of its documentation.
_OF_GPUS = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_DRAM_ACTIVE")
_GPU_LABELS = {"gpu", "UUID", "device", "modelName", "Hostname", "pod", "container", "namespace"}
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",)}

METRICS: dict[str, Declared] = {it.name: it for it in declared_metrics()}


def rules(file: str) -> list[dict[str, Any]]:
    """Return the rules of a file, in order."""
    groups = read_yaml(PROMETHEUS / file)["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED: dict[str, str] = {
    rule["record"]: rule["expr"]
    for rule in rules("recording.yml") + rules("gpus.yml")
    if "record" in rule
}


def _scraped() -> dict[str, set[str]]:
    found = {"up": set(TARGET_LABELS)}
    found |= dict.fromkeys(_OF_GPUS, TARGET_LABELS | _GPU_LABELS)
    for metric in METRICS.values():
        labels = TARGET_LABELS | set(metric.labels)
        labels |= ENGINE_LABELS if metric.process == "engine" else {"worker"}
        for suffix in _SUFFIXES[metric.kind]:
            bucket = {"le"} if suffix == "_bucket" else set[str]()
            found[metric.name + suffix] = labels | bucket
    return found


SCRAPED = _scraped()


def labels_of(metric: str) -> set[str]:
    """Return the labels that a series may have; KeyError: nothing has that name."""
    if metric in SCRAPED:
        return SCRAPED[metric]
    return set().union(*(labels_of(it.metric) for it in names_in(RECORDED[metric]).selectors))


def wrong_in(names: Names) -> list[str]:
    """Return what an expression names that does not exist."""
    wrong: list[str] = []
    seen: set[str] = set()
    for selector in names.selectors:
        try:
            labels = labels_of(selector.metric)
        except KeyError:
            wrong.append(f"no metric {selector.metric}")
            continue
        seen |= labels
        wrong += [
            f"{selector.metric} has no label {it[0]}"
            for it in selector.labels
            if it[0] not in labels
        ]
    return wrong + [f"nothing has the label {label}" for label in names.grouping - seen]


def scraped_series(expression: str) -> set[tuple[str, str]]:
    """Return the declared metrics that an expression reads, through recorded series as well.

    Each once with nothing, and once with every `label="value"` that it has to have.
    """
    found: set[tuple[str, str]] = set()
    for selector in names_in(expression).selectors:
        if selector.metric in RECORDED:
            found |= scraped_series(RECORDED[selector.metric])
        elif selector.metric != "up":
            name = next(
                name
                for name, it in METRICS.items()
                if selector.metric in {name + suffix for suffix in _SUFFIXES[it.kind]}
            )
            found.add((name, ""))
            found |= {
                (name, f'{key}="{value}"') for key, sign, value in selector.labels if sign == "="
            }
    return found


def all_expressions() -> list[str]:
    """Return the expressions of all rules and panels, as Prometheus gets them."""
    found = [rule["expr"] for file in ("recording.yml", "alerts.yml") for rule in rules(file)]
    for file in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            found += [it["expr"].replace("$__rate_interval", "5m") for it in panel["targets"]]
    return found
