"""The study's bookkeeping: what is run anew replaces what it was, the page shows what is recorded."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import ablation, routing_study
from benchmarks.load.routing_study import AZURE, CONVERSATION, StudyCase, markdown, merge, run_case
from sim.policies import registry

CASE = StudyCase(
    "Some traffic",
    ("requests=60,rate=4,prompt=1500,output=20", "synthetic"),
    2,
    "h70",
    (0.5, 0.8),
    policies=("sluice", "round_robin", "oracle"),
    seeds=(0, 1),
)


def record(policy: str, load: float, goodput: float) -> dict[str, Any]:
    return {"policy": policy, "load": load, "goodput_mean": goodput}


def test_new_records_replace_older_ones_and_the_order_is_the_case_s():
    older = [record("oracle", 0.5, 0.9), record("round_robin", 0.8, 0.2), record("gone", 0.5, 0.1)]
    newer = [record("round_robin", 0.8, 0.3), record("sluice", 0.8, 0.7)]
    assert merge(older, newer, CASE) == [
        record("oracle", 0.5, 0.9),
        record("sluice", 0.8, 0.7),
        record("round_robin", 0.8, 0.3),
    ]


def test_a_rate_is_turned_into_a_load(tmp_path: Path):
    case = StudyCase(
        "A rate", CASE.trace, 2, "h70", (), policies=("round_robin",), rate_per_s=3.0, seeds=(0,)
    )
    (row,) = run_case(case, tmp_path, case.policies, None)
    assert row["load"] > 0
    assert row["settings"]["seeds"] == [0]
    assert merge([], [row], case) == [row]


def test_the_page_shows_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = run_case(CASE, tmp_path, ("round_robin", "oracle"), None)
    assert [(row["policy"], row["load"]) for row in rows] == [
        ("round_robin", 0.5),
        ("oracle", 0.5),
        ("round_robin", 0.8),
        ("oracle", 0.8),
    ]
    drawn = StudyCase(
        **{name: getattr(CASE, name) for name in CASE.__slots__} | {"has_picture": True}
    )
    monkeypatch.setattr(routing_study, "CASES", {"drawn": drawn, "empty": CASE})
    monkeypatch.setattr(routing_study, "DOCS", tmp_path)
    monkeypatch.setattr(routing_study, "PAGE", tmp_path / "page.md")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n")
    routing_study.write_page({"drawn": rows, "empty": []})
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert markdown("drawn", drawn, rows) in text
    assert text.count("| round_robin |") == 2
    assert text.count("| oracle: oracle_") == 2
    assert (tmp_path / "images" / "routing-drawn.png").read_bytes().startswith(b"\x89PNG")
    routing_study.write_page({"drawn": rows, "empty": []})
    assert page.read_text() == text, "writing it again changes nothing"


def test_every_case_names_policies_that_exist():
    for case in routing_study.CASES.values():
        assert case.trace in (CONVERSATION, AZURE, routing_study.FLEET_CELL)
        assert bool(case.loads) != bool(case.rate_per_s)
        for policy in case.policies:
            if policy not in registry.GROUPS and policy != registry.ROUTER:
                registry.entry(policy)


def test_the_table_of_rules_is_that_of_the_result_file():
    table = ablation.markdown(ablation.recorded())
    assert f"\n{table}\n" in routing_study.PAGE.read_text(), "run benchmarks.load.ablation"
