"""Stop strings end the text at the same place however it was cut into pieces."""

from typing import SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stops import StopMatcher

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_any_cut_gives_the_naive_result(text: str, stops: list[str], cuts: list[int]) -> None:
    wanted, is_matched = naive(text, stops)
    matcher, shown, start = StopMatcher(stops), "", 0
    for end in [*sorted(cuts), len(text)]:
        shown += matcher.push(text[start : max(start, end)])
        start = max(start, end)
        assert wanted.startswith(shown)
        if matcher.is_matched:
            break
    if not matcher.is_matched:
        shown += matcher.flush()
    assert (shown, matcher.is_matched) == (wanted, is_matched)


def test_a_possible_beginning_is_held_back_and_released() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("trance") == "ENtrance"
    assert matcher.flush() == ""


class _Counted(str):
    """Counts how often somebody looks into it."""

    __slots__ = ("looks",)
    looks: int

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        self.looks += 1
        return super().__getitem__(key)


def test_hostile_stop_strings_cost_what_others_cost() -> None:
    stops = [_Counted(f"{first}{'a' * 1022}c") for first in "xyz"] + [_Counted("a" * 1023 + "b")]
    for stop in stops:
        stop.looks = 0
    matcher = StopMatcher(stops)
    assert matcher.push("a" * 1023) == ""
    assert "".join(matcher.push("a") for _ in range(2_000)) == "a" * 2_000
    assert sum(stop.looks for stop in stops) < 40_000  # and not a million
