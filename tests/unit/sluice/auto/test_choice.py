"""The model of a turn: cheapest as a whole, under the ceiling, above the floor, without bouncing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.auto.choice import (
    SWITCH_MARGIN,
    AutoCandidate,
    AutoReason,
    AutoRules,
    AutoTurn,
    PoolOutlook,
    choose,
    expected_running,
)
from sluice.auto.features import SCHEME, PromptFeatures
from sluice.auto.quality import QualityCell, QualityPrior, table_of
from sluice.errors import ErrorCode, PlatformError

SMALL = AutoCandidate("small", "1", prompt_price=0.1, cached_price=0.01, output_price=0.4)
LARGE = AutoCandidate("large", "1", prompt_price=1.0, cached_price=0.1, output_price=4.0)
BOTH = (SMALL, LARGE)
POOL = PoolOutlook(is_served=True, replicas=1, prompt_token_s=0.0001, output_token_s=0.01)
POOLS = {"small": POOL, "large": POOL}
TABLE = table_of((), {"small": QualityPrior(quality=0.6), "large": QualityPrior(quality=0.9)})
TURN = AutoTurn(PromptFeatures(tokens=1000))
RULES = AutoRules(miss_price=0.001, explored_share=0.0)


def test_a_miss_that_costs_little_goes_to_the_small_model_and_a_dear_one_to_the_large() -> None:
    assert choose(BOTH, TURN, TABLE, POOLS, RULES).model == "small"
    dear = choose(BOTH, TURN, TABLE, POOLS, replace(RULES, miss_price=1.0))
    assert (dear.model, dear.reason) == ("large", AutoReason.CHEAPEST)
    assert [it.name for it in dear.alternatives] == ["small"]


def test_a_long_wait_is_a_cost() -> None:
    waits = POOLS | {"small": POOL._replace(wait_s=60.0)}
    assert choose(BOTH, TURN, TABLE, waits, replace(RULES, second_price=0.001)).model == "large"


def test_the_floor_of_quality_holds_and_says_where_it_is_not_reached() -> None:
    assert choose(BOTH, TURN, TABLE, POOLS, replace(RULES, quality_min=0.8)).model == "large"
    none = choose(BOTH, TURN, TABLE, POOLS, replace(RULES, quality_min=0.95))
    assert (none.model, none.reason) == ("large", AutoReason.BELOW_FLOOR)


def test_a_turn_above_the_ceiling_is_refused_with_its_price() -> None:
    with pytest.raises(PlatformError, match="ceiling of price") as refused:
        choose(BOTH, TURN, TABLE, POOLS, replace(RULES, price_max=1e-6))
    assert (refused.value.status, refused.value.param) == (400, "model")
    under = replace(RULES, price_max=0.0005, miss_price=1.0)
    assert choose(BOTH, TURN, TABLE, POOLS, under).model == "small"


def test_a_fleet_that_is_down_is_a_503_and_no_candidate_a_404() -> None:
    with pytest.raises(PlatformError) as down:
        choose(BOTH, TURN, TABLE, {}, RULES)
    assert (down.value.status, down.value.code) == (503, ErrorCode.NO_CAPACITY)
    with pytest.raises(PlatformError) as none:
        choose((), TURN, TABLE, POOLS, RULES)
    assert none.value.status == 404


def test_only_models_with_room_for_the_conversation_are_chosen() -> None:
    narrow, wide = SMALL._replace(context_tokens_max=512), LARGE._replace(context_tokens_max=32_768)
    assert choose((narrow, wide), TURN, TABLE, POOLS, RULES).model == "large"
    long = AutoTurn(PromptFeatures(tokens=100_000))
    with pytest.raises(PlatformError) as refused:
        choose((narrow, wide), long, TABLE, POOLS, RULES)
    assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_saturated_pool_queues_upper_tiers_and_others_get_the_other_model() -> None:
    dear, full = replace(RULES, miss_price=1.0, queue_priority_min=10), POOL._replace(queued=11)
    saturated = POOLS | {"large": full}
    low = choose(BOTH, TURN, TABLE, saturated, dear)
    assert (low.model, low.reason) == ("small", AutoReason.SATURATED)
    upper = replace(TURN, features=replace(TURN.features, tier_priority=10))
    assert choose(BOTH, upper, TABLE, saturated, dear).model == "large"
    all_full = {"small": full, "large": full}
    assert choose(BOTH, TURN, TABLE, all_full, dear).model == "large"


def test_a_served_pin_answers_at_any_price() -> None:
    pinned = replace(RULES, pin="large")
    assert choose(BOTH, TURN, TABLE, POOLS, pinned).reason is AutoReason.PINNED
    assert choose(BOTH, TURN, TABLE, {"small": POOL}, pinned).model == "small"


def test_a_conversation_keeps_its_model_until_a_change_pays_for_the_prefix() -> None:
    features = PromptFeatures(tokens=20_000, output_tokens_max=50)
    rules = replace(RULES, second_price=0.001)
    stays = AutoTurn(features, current="large", cached={"large": 19_900})
    kept = choose(BOTH, stays, TABLE, POOLS, rules)
    assert (kept.model, kept.reason) == ("large", AutoReason.KEPT) or kept.model == "large"
    gone = choose(BOTH, replace(stays, cached={}), TABLE, POOLS, rules)
    assert (gone.model, gone.reason) == ("small", AutoReason.SWITCHED)


def test_lots_are_drawn_by_new_conversations_alone_and_the_chances_are_told() -> None:
    rules = replace(RULES, explored_share=0.1)
    drawn = choose(BOTH, replace(TURN, draw=0.07), TABLE, POOLS, rules)
    assert (drawn.model, drawn.reason) == ("large", AutoReason.EXPLORED)
    assert drawn.chosen.propensity == pytest.approx(0.05)
    usual = choose(BOTH, replace(TURN, draw=0.5), TABLE, POOLS, rules)
    assert usual.chosen.propensity == pytest.approx(0.95)
    stays = replace(TURN, draw=0.07, current="small", cached={"small": 900})
    assert choose(BOTH, stays, TABLE, POOLS, rules).chosen.propensity == 1.0


def test_a_table_of_another_release_or_scheme_counts_for_little_or_nothing() -> None:
    cells = [QualityCell(TURN.features.cluster, "small", "0", good=0, bad=1000)]
    of_other_release = table_of(cells, TABLE.priors)
    cluster = TURN.features.cluster
    # 20 judgements' worth of 0.6, and ten bad ones of the release before
    assert of_other_release.quality(cluster, "small", "1") == pytest.approx(12 / 30)
    assert of_other_release.quality(cluster, "small", "0") == pytest.approx(12 / 1020)
    strange = table_of(cells, TABLE.priors, scheme=SCHEME + 1)
    assert strange.quality(cluster, "small", "0") == pytest.approx(0.6)


def test_a_cluster_without_judgements_has_the_mean_of_the_models_other_clusters() -> None:
    cells = [QualityCell(0, "new", "1", good=70, bad=10), QualityCell(3, "new", "1", 10, 8)]
    table, mean = table_of(cells, {}), 81 / 100
    assert table.quality(6, "new", "1") == pytest.approx(mean)
    assert table.quality(0, "new", "1") == pytest.approx((70 + 5 * mean) / 85)
    assert table.quality(0, "other", "1") == 0.5
    assert table_of(cells, {}, scheme=SCHEME + 1).quality(0, "new", "1") == 0.5
    published = table_of(cells, {"new": QualityPrior(quality=0.6)})
    assert published.quality(6, "new", "1") == pytest.approx(0.6)


_PRICES = st.floats(0, 100)
_TIMES = st.floats(0, 0.1)


@st.composite
def _worlds(
    draw: st.DrawFn,
) -> tuple[Sequence[AutoCandidate], AutoTurn, dict[str, PoolOutlook], AutoRules]:
    names = [f"m{number}" for number in range(draw(st.integers(1, 5)))]
    candidates = [
        AutoCandidate(name, "1", draw(_PRICES), draw(_PRICES), draw(_PRICES)) for name in names
    ]
    pools = {
        name: PoolOutlook(
            draw(st.booleans()),
            1,
            draw(st.integers(0, 30)),
            draw(_TIMES),
            draw(_TIMES),
            draw(_TIMES),
        )
        for name in names
    }
    tokens = draw(st.integers(0, 10_000))
    current = draw(st.sampled_from(["", *names]))
    cached = {current: draw(st.integers(0, tokens))} if current else {}
    features = PromptFeatures(tokens=tokens, tier_priority=draw(st.integers(0, 10)))
    turn = AutoTurn(features, current=current, cached=cached, draw=draw(st.floats(0, 0.999)))
    rules = AutoRules(
        quality_min=draw(st.floats(0, 1)),
        second_price=draw(st.floats(0, 1)),
        miss_price=draw(st.floats(0, 1)),
        explored_share=draw(st.sampled_from([0.0, 0.01, 0.5])),
        queue_priority_min=draw(st.integers(0, 10)),
    )
    return candidates, turn, pools, rules


@given(world=_worlds())
def test_the_choice_is_served_and_its_chances_add_up_for_any_fleet(world) -> None:
    candidates, turn, pools, rules = world
    if not any(pool.is_served for pool in pools.values()):
        with pytest.raises(PlatformError):
            choose(candidates, turn, TABLE, pools, rules)
        return
    choice = choose(candidates, turn, TABLE, pools, rules)
    options = [choice.chosen, *choice.alternatives]
    assert {it.name for it in options} == {name for name, pool in pools.items() if pool.is_served}
    assert choice.chosen.propensity > 0
    assert sum(it.propensity for it in options) == pytest.approx(1.0)
    assert choice == choose(candidates[::-1], turn, TABLE, pools, rules)


@given(world=_worlds())
def test_a_conversation_leaves_only_for_a_gain_above_the_price_of_its_prefix(world) -> None:
    candidates, turn, pools, rules = world
    if not pools.get(turn.current, PoolOutlook()).is_served:
        return
    choice = choose(candidates, turn, TABLE, pools, rules)
    if choice.reason is not AutoReason.SWITCHED:
        return
    by_name = {it.name: it for it in candidates}
    told = {it.name: it for it in (choice.chosen, *choice.alternatives)}
    stay, go = told[turn.current], choice.chosen
    assert go.cost < stay.cost * (1 - SWITCH_MARGIN) + 1e-12
    anew = expected_running(by_name[go.name], turn, pools[go.name], rules.second_price)
    assert anew[2] == pytest.approx(go.running)  # with all of the prompt computed anew
