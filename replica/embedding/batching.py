"""Groups texts of similar length into batches. Pure.

In a graph call, every text costs as much as the longest text of the call, because shorter texts are
padded. So texts of similar length are computed in the same call.
"""

from collections.abc import Sequence


def plan_batches(
    lengths: Sequence[int], *, tokens_max: int, call_tokens: int
) -> list[tuple[int, ...]]:
    """Return groups of indices into `lengths`, where each index is in exactly one group.

    The groups are the cheapest division of the texts in order of length. A group costs its tokens
    and padding, plus the fixed cost of a call.

    Args:
        lengths: Number of tokens of each text, at least 1.
        tokens_max: Largest number of tokens and padding of a group, which limits the memory of a
            call. A longer text is a group of one.
        call_tokens: Fixed cost of a call, expressed as a number of tokens.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = [0]  # best[n]: cost of the n shortest texts in their best groups
    # begins[n]: index of the first text in the last group of the n + 1 shortest texts
    begins: list[int] = []
    for end, index in enumerate(order, start=1):
        longest = lengths[index]
        widest = max(1, tokens_max // longest)
        costs = [
            (best[begin] + call_tokens + (end - begin) * longest, begin)
            for begin in range(max(0, end - widest), end)
        ]
        cost, begin = min(costs)
        best.append(cost)
        begins.append(begin)
    groups: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        begin = begins[end - 1]
        groups.append(tuple(order[begin:end]))
        end = begin
    return groups
