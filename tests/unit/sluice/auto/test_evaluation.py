"""Off-policy estimates against worlds whose truth is known."""

import math
from random import Random

import pytest

from sluice.auto.choice import propensities
from sluice.auto.evaluation import LoggedOption, LoggedTurn, evaluate, learned
from sluice.auto.quality import QualityCell, QualityPrior, table_of

# Chance of a good answer by cluster: the small model is as good in one, much worse in the other.
TRUTH = {0: {"small": 0.8, "large": 0.85}, 3: {"small": 0.3, "large": 0.9}}
RUNNING = {"small": 0.1, "large": 1.0}
EXPLORED = 0.1


def logged(count: int, seed: int, explored: float = EXPLORED) -> list[LoggedTurn]:
    """Log a policy that sends all to the small model but for lots."""
    random, turns = Random(seed), list[LoggedTurn]()
    chances = dict(zip(("small", "large"), propensities([0.1, 1.0], explored), strict=True))
    options = [LoggedOption(name, "1", RUNNING[name], chances[name]) for name in chances]
    for _ in range(count):
        cluster = random.choice([0, 3])
        model = "small" if random.random() < chances["small"] else "large"
        good = float(random.random() < TRUTH[cluster][model])
        turns.append(LoggedTurn(cluster, model, options, good))
    return turns


PRIORS = {name: QualityPrior(quality=0.5) for name in ("small", "large")}


def test_the_estimate_of_a_new_table_has_the_truth_in_its_interval() -> None:
    cells = [
        QualityCell(cluster, name, "1", 1000 * share, 1000 * (1 - share))
        for cluster, shares in TRUTH.items()
        for name, share in shares.items()
    ]
    table = table_of(cells, PRIORS)
    # Under it cluster 0 stays small (0.05 more is not worth 0.9), cluster 3 goes to the large one.
    truth = (0.8 + 0.9) / 2
    hits = 0
    for seed in range(20):
        found = evaluate(
            logged(2000, seed), table, quality_min=0.0, miss_price=3.0, explored_share=0.0
        )
        assert found.judged == found.turns == 2000
        hits += found.ips.low <= truth <= found.ips.high
        assert abs(found.doubly_robust.mean - truth) < 0.08
        assert found.doubly_robust.error <= found.ips.error * 1.2
        assert found.new_cost == pytest.approx((0.1 + 1.0) / 2, abs=0.05)
        assert 0.45 < found.moved < 0.55
    assert hits >= 17  # of 20, where 19 are expected


def test_the_logged_policy_estimates_itself() -> None:
    turns = logged(1000, 1)
    table = table_of((), PRIORS)
    found = evaluate(turns, table, quality_min=0.0, miss_price=0.0, explored_share=EXPLORED)
    assert found.ips.mean == pytest.approx(found.logged_good.mean)
    assert found.effective == pytest.approx(1000)


def test_nothing_is_said_where_nothing_was_explored_or_judged() -> None:
    table = table_of((), PRIORS)
    unjudged = [LoggedTurn(it.cluster, it.model, it.options) for it in logged(10, 2)]
    found = evaluate(unjudged, table, quality_min=0.0, miss_price=1.0, explored_share=0.0)
    assert (found.judged, found.ips.error, found.effective) == (0, math.inf, 0.0)
    stuck = [LoggedTurn(0, "small", [LoggedOption("small", "1", 0.1, 1.0)], 1.0)]
    assert evaluate(stuck, table, quality_min=0, miss_price=1, explored_share=0).turns == 0


def test_judged_answers_become_cells() -> None:
    turns = logged(400, 3)
    cells = {(it.cluster, it.model): it for it in learned(turns, {})}
    assert sum(it.good + it.bad for it in cells.values()) == 400
    cell = cells[3, "small"]
    assert cell.release == "1"
    assert abs(cell.good / (cell.good + cell.bad) - 0.3) < 0.1
