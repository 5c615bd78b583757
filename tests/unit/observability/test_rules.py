"""Rules, runbooks and dashboards name what exists; promtool tests the alerts where it is there."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer.main

from cli.app import app
from sluice.errors import ErrorCode
from tests.support.yaml_files import read_yaml
from tests.unit.observability.known import (
    GRAFANA,
    METRICS,
    PROMETHEUS,
    RECORDED,
    ROOT,
    rules,
    wrong_in,
)
from tests.unit.observability.promql import names_in

ALERTS = rules("alerts.yml") + [rule for rule in rules("gpus.yml") if "alert" in rule]
NAMES = [rule["alert"] for rule in ALERTS]
RUNBOOKS = ROOT / "docs" / "runbooks"
PROMTOOL = shutil.which("promtool")
# Of Grafana, not of Prometheus.
INTERVAL = "$__rate_interval"


def expressions() -> list[tuple[str, str]]:
    found = [
        (rule.get("record") or rule["alert"], rule["expr"])
        for rule in rules("recording.yml") + rules("alerts.yml") + rules("gpus.yml")
    ]
    for file in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            found += [(f"{file.stem}: {panel['title']}", it["expr"]) for it in panel["targets"]]
    return found


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_every_metric_and_label_exists(where, expression):
    names = names_in(expression.replace(INTERVAL, "5m"))
    assert names.selectors, where
    assert wrong_in(names) == [], where


def test_the_check_finds_unknown_names():
    def wrong(expression: str) -> list[str]:
        return wrong_in(names_in(expression))

    assert wrong("sum by (code) (rate(llm_request_aborts_total[5m]))") == []
    assert wrong("llm_ttft_seconds") == ["no metric llm_ttft_seconds"]
    assert wrong("rate(gone_total[5m]) > 1e6") == ["no metric gone_total"]
    assert wrong('up{pool="x"} == 0') == ["up has no label pool"]
    assert wrong("sum without (le, colour) (llm_ttft_seconds_bucket)") == [
        "nothing has the label colour"
    ]
    assert wrong("gpu_batch_size / on (pool) llm_prefix_cache_hit_ratio{pool='a'}") == []
    for broken in ("sum(up", "up{job=}", "nofunction(up)", "{job='x'}", "up ? 1"):
        with pytest.raises(ValueError, match=r"\w"):
            names_in(broken)


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alerts_have_the_annotations_that_operators_need(rule):
    assert rule["labels"]["severity"] in {"P1", "P2", "P3"}
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    place, _, page = notes["runbook_url"].rpartition("/")
    assert place == "{{ with $externalLabels.runbooks }}{{ . }}{{ else }}docs/runbooks{{ end }}"
    assert page == f"{rule['alert']}.md"
    used = set(re.findall(r"\$labels\.(\w+)", notes["description"]))
    names = names_in(rule["expr"])
    assert used <= names.grouping | {"pool", "instance", "job"}


def test_names_are_unique_and_each_has_a_runbook_that_says_the_same():
    assert len(set(NAMES)) == len(NAMES)
    assert {page.stem for page in RUNBOOKS.glob("[A-Z]*.md")} == set(NAMES)  # others: procedures
    for rule in ALERTS:
        page = (RUNBOOKS / f"{rule['alert']}.md").read_text()
        head = page.split("##")[0]
        assert rule["annotations"]["summary"] in head
        lasts = f", for {rule['for']}" if "for" in rule else ""
        assert f"Severity {rule['labels']['severity']}{lasts};" in head, rule["alert"]
        parts = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert parts == ["What it means", "First look", "Likely causes", "What to do", "Over when"]


def commands() -> dict[str, set[str]]:
    """The commands of `sluice` by their words, with their options."""
    found: dict[str, set[str]] = {}

    def walk(command, words: tuple[str, ...]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*words, name))
        if not hasattr(command, "commands"):
            found[" ".join(words)] = {opt for it in command.params for opt in it.opts}

    walk(typer.main.get_command(app), ())
    return found


@cache
def code() -> str:
    """All code: log lines, columns and values of labels that runbooks quote are strings in it."""
    packages = ("gateway", "router", "replica", "control_plane", "telemetry", "cli", "sluice")
    return "".join(p.read_text() for it in packages for p in sorted((ROOT / it).rglob("*.py")))


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_runbooks_name_existing_things(page):
    text, known = page.read_text(), commands()
    for line in re.findall(r"^sluice (.+)$|`sluice ([^`]+)`", text, re.MULTILINE):
        words = (line[0] or line[1]).split()
        plain = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
        name = next((" ".join(plain[:n]) for n in (3, 2, 1) if " ".join(plain[:n]) in known), None)
        assert name, words
        assert {word for word in words if word.startswith("--")} <= known[name], words
    codes = {str(code) for code in ErrorCode}
    for name in re.findall(r"`([a-z_:0-9]+_[a-z_:0-9]+)[`{]", text):
        is_metric = name in METRICS or name in RECORDED
        assert is_metric or name in codes or f'"{name}"' in code(), name
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_dashboards_equal_their_description():
    path = ROOT / "deploy" / "observability" / "dashboards.py"
    spec = importlib.util.spec_from_file_location("observability_dashboards", path)
    assert spec
    assert spec.loader
    described = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(described)
    pages = {f"{it.uid}.json": described.rendered(it) for it in described.DASHBOARDS}
    committed = {file.name: file.read_text() for file in GRAFANA.glob("*.json")}
    assert committed == pages, "run `python deploy/observability/dashboards.py`"
    for page in map(json.loads, pages.values()):
        for variable in page["templating"]["list"][1:]:
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["query"]
            ).groups()
            assert wrong_in(names_in(f"sum by ({label}) ({metric})")) == []


def test_the_example_scrapes_every_kind_of_process():
    scraped = read_yaml(PROMETHEUS / "prometheus.yml")
    jobs = {job["job_name"] for job in scraped["scrape_configs"]}
    assert jobs == {metric.process.replace(" ", "-") for metric in METRICS.values()}
    assert scraped["rule_files"] == ["recording.yml", "alerts.yml"]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    cases = [
        case
        for file in sorted((PROMETHEUS / "tests").glob("*.yml"))
        for test in read_yaml(file)["tests"]
        for case in test.get("alert_rule_test", ())
    ]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == quiet == set(NAMES)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH: see docs/alerts.md")
def test_promtool_agrees():
    assert PROMTOOL
    tests = sorted((PROMETHEUS / "tests").glob("*.yml"))
    for arguments in (
        ["check", "rules", "recording.yml", "alerts.yml", "gpus.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["test", "rules", *(os.fspath(Path("tests") / file.name) for file in tests)],
    ):
        done = subprocess.run(
            [PROMTOOL, *arguments],
            cwd=PROMETHEUS,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_lists_all_alerts():
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (P\d) \|", page, re.MULTILINE)
    assert rows == [(it["alert"], it["alert"], it["labels"]["severity"]) for it in ALERTS]
