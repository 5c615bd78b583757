"""Log probabilities of a prompt, told in parts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.logprobs import PromptLogprobLine


def _columns(prompt: list[int], first: int, end: int):
    places = range(first, end)
    top = [(place * 10 + rank, -float(rank)) for place in places for rank in range(place % 3)]
    return first, [-float(place) for place in places], [place % 3 for place in places], top


@given(st.integers(1, 40), st.lists(st.integers(1, 9)), st.integers(0, 39))
def test_parts_told_again_by_another_engine_change_nothing(size, cuts, lost_at) -> None:
    prompt = [7 * place for place in range(size)]
    line = PromptLogprobLine(prompt)
    for end in (min(lost_at, size), size):  # the second engine begins anew
        at = 1
        for cut in [*cuts, size]:
            line.learn(*_columns(prompt, at, min(at + cut, end)))
            at = min(at + cut, max(end, 1))
    assert line.is_whole
    assert [entry.token for entry in line.entries] == prompt
    for place, entry in enumerate(line.entries[1:], 1):
        assert entry.logprob == -float(place)
        assert list(entry.top) == [(place * 10 + rank, -float(rank)) for rank in range(place % 3)]
