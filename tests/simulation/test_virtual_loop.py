"""Virtual time: ordered, instant, and honest about deadlocks."""

import asyncio
import time

import pytest

from sim.loop import DeadlockError, run


def test_time_moves_only_when_nothing_is_ready():
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, delay_s: float) -> None:
            for _ in range(3):
                await asyncio.sleep(delay_s)
                seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("slow", 3600.0))
            tasks.create_task(sleeper("fast", 1500.0))
        return seen

    assert run(main()) == [
        ("fast", 1500.0),
        ("fast", 3000.0),
        ("slow", 3600.0),
        ("fast", 4500.0),
        ("slow", 7200.0),
        ("slow", 10800.0),
    ]


def test_deadlines_obey():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(86_400)  # in real time it would meet the test's own limit


def test_a_deadlock_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run(main())


def test_threads_are_refused():
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="threads"):
        run(main())
