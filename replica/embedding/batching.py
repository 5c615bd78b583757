"""Groups texts of similar length into batches. Pure.

A graph call computes a rectangle: every text of it costs as many tokens as the longest. One long
text among short ones would make them all long, so texts of about the same length go together.
"""

from collections.abc import Sequence


def plan_batches(
    lengths: Sequence[int], *, tokens_max: int, call_tokens: int
) -> list[tuple[int, ...]]:
    """Return groups of indices into `lengths`; each index is in exactly one.

    The cheapest division of the lengths in sorted order, where a group costs its padded tokens plus
    what a call costs by itself.

    Args:
        lengths: Tokens of each text, at least 1.
        tokens_max: Most tokens of a group of several texts, padding included: bounds the memory of
            a call.
        call_tokens: Fixed cost of a call, in tokens.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = [0]  # best[n]: cost of the n shortest
    begins: list[int] = []  # begins[n]: where the last group of the n + 1 shortest begins
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
