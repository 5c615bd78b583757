"""Random series through every expression of ours: promtool computes what our evaluator does."""

import math
import random
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml

from control_plane.promql.expression import compiled
from control_plane.promql.matching import EvaluationError
from control_plane.promql.series import SeriesStore
from tests.unit.observability.known import rules
from tests.unit.observability.promql import names_in

PROMTOOL = shutil.which("promtool")
STEP_S, STEPS = 15, 240
# Beside the grid of samples: Prometheus 2 counts a sample at a range's begin, and 3 does not.
AT_S = 53 * 60 + 7
EXTRA = [
    'absent(nothing_here{job="x"})',
    "count by (pool) (gpu_batch_size > bool 5) * 2 ^ 3 - -1",
    "irate(llm_output_tokens_total[5m]) % 7",
    "delta(gpu_batch_size[10m]) >= 0",
    "clamp_max(sum without (instance) (gpu_batch_size), 9)",
    "scalar(sum(gpu_batch_size)) + vector(1) == bool 4",
    "sum_over_time(gpu_batch_size[5m]) / count_over_time(gpu_batch_size[5m])",
    "min_over_time(gpu_batch_size[5m]) or last_over_time(gpu_batch_size[5m] offset 3m)",
    "gpu_batch_size{instance!~'a|c'} * ignoring (instance) group_left sum by (pool) (gpu_batch_size)",
]


def series(chance: random.Random, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield series that an expression may read, with and without the labels that it demands."""
    wanted: dict[str, dict[str, set[str]]] = {}
    for selector in names_in(text).selectors:
        labels = wanted.setdefault(selector.metric, {"instance": {"a", "b"}, "pool": {"p", "q"}})
        if selector.metric.endswith("_bucket"):
            labels["le"] = {"0.1", "0.5", "2", "+Inf"}
        for label, _, value in selector.labels:
            labels.setdefault(label, {"other"}).update(value.split("|"))
    for name, labels in wanted.items():
        for values in product(*map(sorted, labels.values())):
            if "le" in labels or chance.random() < 0.9:
                yield name, dict(zip(labels, values, strict=True))


def samples(chance: random.Random, name: str, labels: dict[str, str]) -> list[float | None]:
    is_counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
    if not is_counter:
        values = [round(chance.uniform(-5, 20), 3) for _ in range(STEPS)]
        return [None if chance.random() < 0.05 else value for value in values]
    place = ["0.1", "0.5", "2", "+Inf"].index(labels.get("le", "0.1")) + 1
    found, count = [], 10_000.0 * place
    for _ in range(STEPS):
        count += place * chance.randrange(5)
        found.append(count)
    if chance.random() < 0.3 and "le" not in labels:  # a restart
        at = chance.randrange(STEPS)
        found[at:] = [value - found[at] for value in found[at:]]
    return found


def selector(name: str, labels: dict[str, str]) -> str:
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def rounded(value: float) -> float:
    return math.floor(value * 1e6 + 0.5) / 1e6


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH: see docs/alerts.md")
def test_promtool_computes_the_same_of_random_series(tmp_path: Path):
    chance, tests, compared = random.Random(30), [], 0
    of_rules = [rule["expr"] for file in ("recording.yml", "alerts.yml") for rule in rules(file)]
    for text in [*of_rules, *EXTRA]:
        expression = compiled(text)
        store, given = SeriesStore(dict.fromkeys(expression.reads, 10**9), 100_000), []
        for number, (name, labels) in enumerate(series(chance, text)):
            values = samples(chance, name, labels)
            for place, value in enumerate(values):
                if value is not None:
                    one = (name, frozenset(labels.items()), value)
                    store.write(str(number), place * STEP_S * 1000, [one])
            written = " ".join("_" if value is None else repr(value) for value in values)
            given.append({"series": selector(name, labels), "values": written})
        try:
            result = expression.evaluate(store, AT_S * 1000)
        except EvaluationError:
            continue  # random labels match more than once
        assert isinstance(result, dict)
        finite = {it: value for it, value in result.items() if math.isfinite(value)}
        if finite != result or any(abs(it) > 1e9 for it in result.values()):
            continue
        compared += bool(result)
        expected = [
            {"labels": selector("", dict(sorted(it))), "value": rounded(value)}
            for it, value in result.items()
        ]
        asked = {"expr": f"round(({text}), 1e-6)", "eval_time": f"{AT_S}s"}
        asked["exp_samples"] = expected
        tests.append({"interval": f"{STEP_S}s", "input_series": given, "promql_expr_test": [asked]})
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": f"{STEP_S}s", "tests": tests}))
    assert PROMTOOL
    command = [PROMTOOL, "test", "rules", file.name]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert compared > len(tests) // 2
