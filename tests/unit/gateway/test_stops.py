"""Stop strings end the text at the same place however it was cut into pieces."""

import weakref
from typing import Self, SupportsIndex

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

    __slots__ = ("__weakref__", "looks")
    looks: int

    def __new__(cls, text: str) -> Self:
        self = super().__new__(cls, text)
        self.looks = 0
        return self

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        self.looks += 1
        return super().__getitem__(key)


def hostile() -> list[_Counted]:
    return [_Counted(f"{first}{'a' * 1022}c") for first in "xyz"] + [_Counted("a" * 1023 + "b")]


def test_hostile_stop_strings_cost_as_much_as_others() -> None:
    stops = hostile()
    matcher = StopMatcher(stops)
    assert matcher.push("a" * 1023) == ""
    assert "".join(matcher.push("a") for _ in range(2_000)) == "a" * 2_000
    assert sum(stop.looks for stop in stops) < 40_000  # and not a million


def test_of_a_long_piece_only_the_end_is_walked() -> None:
    stops = hostile()
    assert StopMatcher(stops).push("a" * 65_536) == "a" * (65_536 - 1023)
    assert sum(stop.looks for stop in stops) < 10_000


def test_many_streams_do_not_slow_each_other_down() -> None:
    streams = [[_Counted("a" * 99 + chr(0x4E00 + 4 * i + j)) for j in range(4)] for i in range(100)]
    matchers = [StopMatcher(stops) for stops in streams]
    for _ in range(100):  # a token of each in turn
        for matcher in matchers:
            matcher.push("aa")
    for stops in streams:
        assert sum(stop.looks for stop in stops) < 5_000


def test_stop_strings_do_not_outlive_their_stream() -> None:
    matcher = StopMatcher([stop := _Counted("aab")])
    assert matcher.push("aa") == ""
    assert matcher.push("aac") == "aaaac"
    told = weakref.ref(stop)
    del matcher, stop
    assert told() is None
