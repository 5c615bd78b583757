"""Who is held is told once, and again when it was over in between."""

from control_plane.quality.held import ALERT_S, HeldCases
from control_plane.quality.verdicts import Alert, Group, Held, Ruling


def ruling(*groups: tuple[str, str, tuple[str, ...]]) -> Ruling:
    """(pool, asking, who is held) of what was judged."""
    alerts: dict[Group, dict[Alert, tuple[str, ...]]] = {
        (pool, asking): {Alert.HELD: names} if names else {} for pool, asking, names in groups
    }
    held = {held_in(pool, name) for pool, _, names in groups for name in names}
    return Ruling((), tuple(held), alerts, {}, {})


def held_in(pool: str, name: str) -> Held:
    return Held(name, pool, "node", "pool")


def test_pools_that_are_judged_in_different_batches_are_told_once_each() -> None:
    cases = HeldCases()
    told = [
        cases.news(ruling((pool, "a", (pool + "-r",))), float(turn))
        for turn in range(5)
        for pool in ("p", "q")
    ]
    assert [len(news) for news in told] == [1, 1, *[0] * 8]


def test_one_that_was_well_again_is_told_again() -> None:
    cases = HeldCases()
    assert cases.news(ruling(("p", "a", ("r",))), 0.0) == [held_in("p", "r")]
    assert cases.news(ruling(("p", "a", ())), 1.0) == []
    assert cases.news(ruling(("p", "a", ("r",))), 2.0) == [held_in("p", "r")]


def test_another_prompt_that_finds_nothing_ends_nothing() -> None:
    cases = HeldCases()
    cases.news(ruling(("p", "a", ("r",)), ("p", "b", ("r",))), 0.0)
    assert cases.news(ruling(("p", "c", ())), 1.0) == []
    assert cases.news(ruling(("p", "b", ())), 1.0) == []
    assert cases.news(ruling(("p", "a", ("r",))), 2.0) == []


def test_what_is_not_found_again_for_long_is_over() -> None:
    cases = HeldCases()
    cases.news(ruling(("p", "a", ("r",))), 0.0)
    assert len(cases.news(ruling(("p", "a", ("r",))), ALERT_S + 1)) == 1
