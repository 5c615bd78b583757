"""Runs ways of serving the same load in turns, and compares their CPU times."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping

from benchmarks.load.sse_client import cpu_seconds

Turn = Callable[[], Awaitable[None]]
Rounds = dict[str, list[dict[str, float]]]


async def in_turns(
    turns: Mapping[str, Turn], groups: dict[str, list[int]], *, rounds: int, limit_s: float
) -> Rounds:
    """Return the CPU seconds of each group of processes, by way and round.

    Args:
        turns: Ways of serving the load, by name.
        groups: Process ids, by name.
        rounds: Number of rounds, after one further round as a warm-up.
        limit_s: Longest time of one turn, in seconds.
    """
    found: Rounds = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            before = cpu_seconds(groups)
            async with asyncio.timeout(limit_s):
                await turn()
            after = cpu_seconds(groups)
            if number:
                found[name].append({it: after[it] - before[it] for it in groups})
    return found


def median_us(rounds: list[dict[str, float]], operations: int) -> dict[str, float]:
    """Return the median CPU time per operation of each group and of all, in microseconds."""
    whole = [found | {"total": sum(found.values())} for found in rounds]
    return {
        name: round(statistics.median([it[name] for it in whole]) / operations * 1e6, 2)
        for name in whole[0]
    }
