"""What a node is told of more golden prompts than it can be asked."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.quality.askings import DEFAULT, Asking
from control_plane.quality.shares import (
    DEFAULTS_RESERVED,
    NODE_BYTES_MAX,
    NODE_PROMPTS_MAX,
    ROUND_S,
    Item,
    item_of,
    round_of,
    units,
)
from control_plane.quality.shares import (
    chosen as chosen_items,
)
from sluice.wire.agent.v1 import agent_pb2 as wire

BASE = "b" * 64


def asking(
    prompt: str,
    owner: str,
    adapter: str = "a",
    *,
    tokens: int = 16,
    token: int = 2**31 - 1,
    is_rollout: bool = False,
) -> Asking:
    digest = adapter.rjust(64, "0")
    name = f"{prompt}/{BASE[:16]}/{adapter.rjust(16, '0')}"
    ids, model = (token,) * tokens, f"model-of-{owner}"
    return Asking(name, prompt, model, BASE, digest, ids, 16, 60, (), owner, is_rollout)


def defaults(count: int) -> list[Asking]:
    names = (f"{number:064x}" for number in range(count))
    return [
        Asking(f"{DEFAULT}/{name}", DEFAULT, "", name, "", tuple(range(16)), 16, 60)
        for name in names
    ]


def plain(counts: Sequence[int]) -> list[Asking]:
    """So many prompts of each of several owners."""
    return [
        asking(f"golden_{owner:03}_{number:03}", f"owner-{owner:03}")
        for owner, count in enumerate(counts)
        for number in range(count)
    ]


def by_owner(told: Sequence[Asking]) -> Counter[str]:
    return Counter(one.owner for one in told if one.prompt_id != DEFAULT)


def chosen(askings: Sequence[Asking], round_: int) -> list[Asking]:
    """What a node is told, its bases all the same."""
    ordered = sorted(askings, key=lambda one: one.id)
    prompts: dict[tuple[str, str], list[Asking]] = {}
    for one in ordered:
        if one.prompt_id != DEFAULT:
            prompts.setdefault((one.owner, one.prompt_id), []).append(one)
    items: dict[str, list[Item]] = {}
    for (owner, _), parts in prompts.items():
        if item := item_of(parts):
            items.setdefault(owner, []).append(item)
    return chosen_items([one for one in ordered if one.prompt_id == DEFAULT], items, round_)


@st.composite
def any_askings(draw: st.DrawFn) -> list[Asking]:
    found = defaults(draw(st.integers(0, 40)))
    sizes = st.lists(st.integers(1, 60), max_size=12)
    for owner, count in enumerate(draw(st.one_of(sizes, st.lists(st.just(1), max_size=150)))):
        is_long, rollouts = draw(st.booleans()), draw(st.integers(0, count))
        for number in range(count):
            is_rollout = number < rollouts
            for arm in ("a", "b") if is_rollout else ("a",):
                found.append(
                    asking(
                        f"golden_{owner:03}_{number:03}",
                        f"owner-{owner:03}" if owner else "",
                        arm,
                        tokens=2048 if is_long else 512,
                        is_rollout=is_rollout,
                    )
                )
    return found


@settings(max_examples=100)
@given(askings=any_askings(), round_=st.integers(0, 10**8))
def test_a_node_is_never_told_more_than_it_can_take(askings, round_) -> None:
    told = chosen(askings, round_)
    message = wire.SyncResponse(golden_prompts=[one.wire() for one in told])
    assert len(told) == len({one.id for one in told}) <= NODE_PROMPTS_MAX
    assert message.ByteSize() <= NODE_BYTES_MAX
    bases = [one for one in told if one.prompt_id == DEFAULT]
    there = sum(one.prompt_id == DEFAULT for one in askings)
    assert len(bases) >= min(there, DEFAULTS_RESERVED), "the platform's own are never crowded out"
    assert told == chosen(list(reversed(askings)), round_), "everybody finds the same"
    arms = Counter(one.prompt_id for one in askings)
    for prompt, count in Counter(one.prompt_id for one in told).items():
        assert prompt == DEFAULT or count == arms[prompt], "releases are asked together"
    if sum(units(one) for one in askings) <= NODE_PROMPTS_MAX:
        assert len(told) == len(askings), "there is room for everything"


@settings(max_examples=50)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), round_=st.integers(0, 10**6))
def test_room_is_shared_equally_by_owners(counts, round_) -> None:
    told = chosen(defaults(1) + plain(counts), round_)
    got = by_owner(told)
    assert len(got) == len(counts), "everybody gets something while there is room"
    assert sum(got.values()) == min(sum(counts), NODE_PROMPTS_MAX - 1), "no room is left unused"
    most = max(got.values())
    for owner, count in enumerate(counts):
        assert got[f"owner-{owner:03}"] >= min(count, most - 1), "who has more gives up first"


@settings(max_examples=40)
@given(
    counts=st.one_of(
        st.lists(st.integers(1, 60), min_size=1, max_size=10),
        st.lists(st.integers(1, 3), min_size=60, max_size=150),
    ),
    start=st.integers(0, 10**6),
)
def test_everything_is_asked_within_the_stated_number_of_rounds(counts, start) -> None:
    askings = defaults(20) + plain(counts)
    slots = NODE_PROMPTS_MAX - DEFAULTS_RESERVED
    rounds = -(-max(counts) * len(counts) // slots) + 1
    seen: set[str] = set()
    for round_ in range(start, start + rounds):
        seen |= {one.id for one in chosen(askings, round_) if one.prompt_id != DEFAULT}
    assert seen == {one.id for one in askings if one.prompt_id != DEFAULT}
    for round_ in range(start, start + 3):
        seen |= {one.id for one in chosen(askings, round_)}
    assert seen == {one.id for one in askings}, "the platform's take turns, too"


@settings(max_examples=40)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8),
    start=st.integers(0, 10**6),
)
def test_nothing_waits_forever_for_rollouts(prompts, start) -> None:
    askings = [
        asking(f"golden_{owner:03}_{number:03}", f"owner-{owner:03}", arm, is_rollout=is_rollout)
        for owner, (rollouts, others) in enumerate(prompts)
        for number, is_rollout in enumerate([True] * rollouts + [False] * others)
        for arm in (("a", "b") if is_rollout else ("a",))
    ]
    owners = len(prompts)
    rounds = 8 * max(sum(pair) for pair in prompts) * owners // (NODE_PROMPTS_MAX // 2) + 2
    seen: set[str] = set()
    for round_ in range(start, start + rounds):
        seen |= {one.id for one in chosen(askings, round_)}
    assert seen == {one.id for one in askings}


def test_prompts_of_a_rollout_come_first_in_the_share_of_their_owner() -> None:
    rollouts = [
        asking(f"zz_{number}", "one", arm, is_rollout=True) for number in range(4) for arm in "ab"
    ]
    askings = rollouts + plain([100, 100])
    askings += [asking(f"aa_{number:03}", "one") for number in range(100)]
    for round_ in range(20):
        told = {one.id for one in chosen(askings, round_)}
        assert told >= {one.id for one in rollouts}
        assert by_owner(chosen(askings, round_))["owner-000"] >= 10, "at nobody else's cost"


def test_prompts_that_are_longer_than_any_may_be_are_left_out() -> None:
    assert chosen([asking("golden_1", "one", tokens=20_000)], 0) == []


def test_a_round_lasts_as_long_as_it_says() -> None:
    assert round_of(ROUND_S * 7 - 1) == 6
    assert round_of(ROUND_S * 7) == 7
