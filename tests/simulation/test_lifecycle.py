"""`run_every` in virtual time: the rhythm, slow steps, expected errors, and errors that end it."""

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.loop import run
from sluice.lifecycle import backoff_s, run_every


async def spans(
    durations_s: Iterable[float], *, interval_s: float, step_timeout_s: float = 1e9
) -> list[tuple[float, float]]:
    """Return when each step began and ended; step n takes the n-th duration, then all ends."""
    loop = asyncio.get_running_loop()
    left, seen = iter(durations_s), []

    async def step() -> None:
        duration_s = next(left, None)
        if duration_s is None:
            raise LookupError("no more")
        began_s = loop.time()
        try:
            await asyncio.sleep(duration_s)
        finally:
            seen.append((began_s, loop.time()))

    with pytest.raises(LookupError):
        await run_every(
            interval_s, step, name="test", expected=(OSError,), step_timeout_s=step_timeout_s
        )
    return seen


def starts(found: list[tuple[float, float]]) -> list[float]:
    return [began_s for began_s, _ in found]


def test_short_steps_keep_the_rhythm_of_the_start() -> None:
    found = run(spans([0.25, 0.75, 0.5, 0.0], interval_s=1.0))
    assert starts(found) == [0.0, 1.0, 2.0, 3.0]


def test_a_slow_step_delays_the_next_and_missed_ticks_are_dropped() -> None:
    found = run(spans([0.0, 3.5, 0.0, 0.0], interval_s=1.0))
    assert starts(found) == [0.0, 1.0, 4.5, 5.5]


def test_a_step_beyond_its_deadline_is_ended_and_the_loop_goes_on() -> None:
    found = run(spans([100.0, 0.0], interval_s=5.0, step_timeout_s=2.0))
    assert found == [(0.0, 2.0), (5.0, 5.0)]


@settings(max_examples=200)
@given(
    durations=st.lists(st.integers(0, 40).map(lambda eighths: eighths / 8), max_size=20),
    interval=st.integers(1, 16).map(lambda eighths: eighths / 8),
)
def test_steps_never_overlap_and_are_never_closer_than_the_rhythm(
    durations: list[float], interval: float
) -> None:
    found = run(spans(durations, interval_s=interval))
    assert len(found) == len(durations)
    for (began_s, ended_s), (next_s, _) in pairwise(found):
        assert next_s == max(began_s + interval, ended_s)


def test_expected_errors_are_survived() -> None:
    times: list[float] = []

    async def step() -> None:
        times.append(asyncio.get_running_loop().time())
        raise OSError("the peer is away") if len(times) < 4 else LookupError("a bug")

    async def main() -> None:
        with pytest.raises(LookupError):
            await run_every(2.0, step, name="test", expected=(OSError,), step_timeout_s=1.0)

    run(main())
    assert times == [0.0, 2.0, 4.0, 6.0]


def test_an_unexpected_error_ends_the_group_and_its_other_tasks() -> None:
    ended: list[str] = []

    async def bystander() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("bystander")

    async def broken() -> None:
        raise LookupError("a bug")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bystander())
            tasks.create_task(
                run_every(1.0, broken, name="test", expected=(OSError,), step_timeout_s=1.0)
            )

    with pytest.raises(ExceptionGroup) as raised:
        run(main())
    assert [type(error) for error in raised.value.exceptions] == [LookupError]
    assert ended == ["bystander"]


def test_a_day_of_seconds_loses_no_tick() -> None:
    seconds, steps = 86_400, 0

    async def step() -> None:
        nonlocal steps
        steps += 1

    async def main() -> None:
        async with asyncio.timeout(seconds + 0.5):
            await run_every(1.0, step, name="test", expected=(), step_timeout_s=1.0)

    with pytest.raises(TimeoutError):
        run(main())
    assert steps == seconds + 1


def test_back_off_doubles_up_to_its_bound() -> None:
    pauses = [backoff_s(attempt, first_s=0.5, max_s=5.0) for attempt in range(6)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff_s(10_000, first_s=0.5, max_s=5.0) == 5.0
