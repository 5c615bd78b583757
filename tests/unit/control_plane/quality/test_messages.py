"""What nodes are told is made once, shared, and bounded by its bytes."""

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from control_plane.quality.askings import Asking
from control_plane.quality.messages import Messages

BASES = "abcdef"


def asking(base: str, number: int = 0, every_s: int = 60) -> Asking:
    name = f"golden_{number}/{base}"
    return Asking(name, "golden", "m", base, "", (150_000,) * 500, 16, every_s)


def test_nodes_that_serve_the_same_base_hear_the_same_message() -> None:
    messages, keys = Messages(), [frozenset(pair) for pair in combinations(BASES, 2)]
    told = [messages.of(key, 1, lambda key=key: [asking(one) for one in key]) for key in keys]
    assert len({id(message) for all_ in told for message in all_}) == len(BASES)
    assert messages.size < len(keys) * 1024 + len(BASES) * 4096


def test_a_round_that_tells_the_same_is_the_same_list() -> None:
    messages, key = Messages(), frozenset("a")
    first = messages.of(key, 1, lambda: [asking("a")])
    assert messages.of(key, 1, list) is first, "not chosen anew within a round"
    assert messages.of(key, 2, lambda: [asking("a")]) is first
    other = messages.of(key, 3, lambda: [asking("a", every_s=5)])
    assert [one.every_s for one in other] == [5]
    assert [one.every_s for one in first] == [60], "whoever was told it may still hold it"


def test_only_changed_messages_are_forgotten() -> None:
    messages = Messages()
    kept = messages.of(frozenset("a"), 1, lambda: [asking("a")])
    messages.of(frozenset("ab"), 1, lambda: [asking("a"), asking("b")])
    messages.forget({"b", "c"})
    assert messages.of(frozenset("a"), 1, list) is kept
    assert messages.of(frozenset("ab"), 1, list) == []


def test_the_sets_that_were_asked_for_longest_ago_go_first() -> None:
    messages = Messages(bytes_max=6_000)
    for base in "abc":
        messages.of(frozenset(base), 1, lambda base=base: [asking(base)])
        messages.of(frozenset("a"), 1, lambda: [asking("a")])
    calls: list[str] = []

    def chosen(base: str) -> list[Any]:
        calls.append(base)
        return [asking(base)]

    for base in "acb":
        messages.of(frozenset(base), 1, lambda base=base: chosen(base))
    assert calls[-1] == "b"
    assert "a" not in calls


STEPS = st.tuples(
    st.frozensets(st.sampled_from(BASES), max_size=3), st.integers(0, 3), st.sampled_from([5, 60])
)


@given(steps=st.lists(STEPS, max_size=40), forgotten=st.sets(st.sampled_from(BASES)))
def test_bytes_are_counted_and_bounded(steps, forgotten) -> None:
    messages = Messages(bytes_max=20_000)
    for bases, round_, every_s in steps:
        wanted = [asking(base, every_s=every_s) for base in sorted(bases)]
        told = messages.of(bases, round_, lambda wanted=wanted: wanted)
        assert {one.base_digest for one in told} == bases
        assert messages.size <= 20_000
    messages.forget(forgotten)
    messages.forget(set(BASES))
    messages.forget({""})
    empty = messages.size
    assert empty in (0, 1024), "at most the node that serves nothing"
