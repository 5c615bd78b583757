from hypothesis import given
from hypothesis import strategies as st

from replica.embedding.batching import plan_batches

LENGTHS = st.lists(st.integers(1, 256), max_size=32)


def cost(groups, lengths, call_tokens):
    return sum(call_tokens + len(g) * max(lengths[i] for i in g) for g in groups)


@given(LENGTHS, st.integers(1, 2048), st.integers(0, 100))
def test_each_text_is_computed_once_within_the_bound(lengths, tokens_max, call_tokens) -> None:
    groups = plan_batches(lengths, tokens_max=tokens_max, call_tokens=call_tokens)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= tokens_max


@given(st.lists(st.integers(1, 256), min_size=1, max_size=32), st.integers(0, 100))
def test_no_simple_rule_is_cheaper(lengths, call_tokens) -> None:
    planned = plan_batches(lengths, tokens_max=10**6, call_tokens=call_tokens)
    everyone = range(len(lengths))
    together, alone = [everyone], [[i] for i in everyone]
    order = sorted(everyone, key=lengths.__getitem__)
    halves = [half for half in (order[: len(order) // 2], order[len(order) // 2 :]) if half]
    ours = cost(planned, lengths, call_tokens)
    assert ours <= min(cost(groups, lengths, call_tokens) for groups in (together, alone, halves))


def test_a_long_text_goes_apart_from_short_ones() -> None:
    groups = plan_batches([8, 250, 9, 8], tokens_max=1024, call_tokens=16)
    assert sorted(map(sorted, groups)) == [[0, 2, 3], [1]]
