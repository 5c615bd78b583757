"""The arithmetic of the benchmark on judged questions, on small sets that are made up."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.judged_curves import Judged, calibration_error, curve_of, error_by_chance
from benchmarks.judged_routers import STRONG, WEAK, JudgedQuestion, by_auto, judged_of, table_from
from benchmarks.micro.auto_judged import figures, questions_of, summary, trial

# Ten questions: the strong model is right in eight, the weak one in four, one of which the strong
# one misses.
WEAK_RIGHT = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
STRONG_RIGHT = [1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


def _judged() -> Judged:
    weak, strong = np.array(WEAK_RIGHT, float), np.array(STRONG_RIGHT, float)
    return Judged(weak, strong, np.full(10, 0.01), np.full(10, 1.0))


def test_equal_scores_are_the_random_mix() -> None:
    curve = curve_of(np.zeros(10), _judged())
    assert curve.accuracy == pytest.approx(np.linspace(0.4, 0.8, 11))
    assert curve.cost == pytest.approx(np.linspace(0.01, 1.0, 11))
    assert curve.share_at(0.76) == pytest.approx(0.9)
    assert curve.cost_at(0.76) == pytest.approx(0.9 + 0.1 * 0.01)
    assert curve.recovered == pytest.approx(0.5)


def test_the_oracle_asks_the_strong_model_only_where_it_gains() -> None:
    judged = _judged()
    curve = curve_of(judged.strong - judged.weak, judged)
    assert curve.accuracy[:6] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert curve.accuracy[-1] == pytest.approx(0.8)
    assert curve.share_at(0.76) == pytest.approx(0.36)
    assert curve.share_at(0.3) == 0.0
    assert curve.share_at(0.99) == 1.0
    assert curve.recovered == pytest.approx(0.925)


def test_the_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    predicted = np.array([0.25, 0.25, 0.25, 0.25, 0.9, 0.9])
    right = np.array([0, 0, 0, 1, 1, 0], float)
    assert calibration_error(predicted, right) == pytest.approx((4 * 0.0 + 2 * 0.4) / 6)
    assert calibration_error(np.ones(3), np.ones(3)) == 0.0


def test_chance_alone_has_an_error_that_falls_with_the_size() -> None:
    random = np.random.default_rng(0)
    small, large = (error_by_chance(np.full(it, 0.7), random) for it in (50, 5000))
    assert 0.03 < small < 0.08
    assert large < 0.01


def test_the_cluster_that_the_weak_model_fails_goes_to_the_strong_one_first() -> None:
    easy = [
        JudgedQuestion(f"Which colour has a ripe apple of kind {it}?", True, True)
        for it in range(9)
    ]
    hard = [
        JudgedQuestion(f"solve the equation x^2 + {it} = 7, and prove it", False, True)
        for it in range(9)
    ]
    table = table_from([*easy, *hard], {})
    found = by_auto([*easy, *hard], table)
    assert found.scores[9:].min() > found.scores[:9].max()
    # Nine judgements of the cell, and five at the mean of the model's 18 in all cells.
    assert found.weak[0] == pytest.approx((9 + 5 * 10 / 20) / 14)
    assert found.strong[9] == pytest.approx((9 + 5 * 19 / 20) / 14)


def test_a_trial_predicts_the_half_that_it_has_not_seen() -> None:
    questions = [
        JudgedQuestion(
            f"word{it % 7} of the question {it} " + "+ 3 = " * (it % 2), it % 3 > 0, it % 9 > 0
        )
        for it in range(60)
    ]
    judged, routers = trial(questions, seed=3)
    assert all(len(it.scores) == len(judged.weak) == 30 for it in routers.values())
    found = figures(judged, routers)
    assert found["gap_recovered"]["random"] == pytest.approx(0.5)
    assert found["calls_at_95_percent"]["oracle"] <= found["calls_at_95_percent"]["random"]
    told = summary([trial(questions, seed) for seed in range(2)], replicates=20)
    assert told["gap_recovered"]["random"] == [0.5, 0.5, 0.5]


def test_a_checkout_is_read_without_the_prompts_that_are_left_out(tmp_path: Path) -> None:
    evals = tmp_path / "routellm/evals"
    (evals / "mmlu/responses").mkdir(parents=True)
    (evals / "gsm8k").mkdir()
    head = f"prompt,{WEAK},{STRONG}"
    (evals / "mmlu/responses/mmlu_a.csv").write_text(f'{head}\n"a,\nb",True,False\nc,False,True\n')
    (evals / "mmlu/contaminated_prompts.jsonl").write_text('{"eval_prompt": "c"}\n')
    (evals / "gsm8k/gsm8k_responses.csv").write_text(f"{head},{WEAK}_response\nd,True,True,x\n")
    found = questions_of(tmp_path)
    assert found["mmlu"] == [JudgedQuestion("a,\nb", weak=True, strong=False)]
    assert found["gsm8k"] == [JudgedQuestion("d", weak=True, strong=True)]
    assert found["both"] == [*found["mmlu"], *found["gsm8k"]]
    assert judged_of(found["gsm8k"]).strong_price[0] > 100 * judged_of(found["gsm8k"]).weak_price[0]
