"""Tests the trials of adapters: the replica of each, adapters at fault, and reports."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from replica.agent import trials as module
from replica.agent.golden import GoldenTarget
from replica.agent.trials import FAILURES_MAX, AdapterTrials, is_fault
from sluice.errors import ErrorCode, FailedError
from sluice.wire.agent.v1 import agent_pb2 as agent

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("code", "failures", "expected"),
    [
        (ErrorCode.ADAPTER_INVALID, 1, True),
        (ErrorCode.ENGINE_FAILED, FAILURES_MAX - 1, False),
        (ErrorCode.ENGINE_FAILED, FAILURES_MAX, True),
        (ErrorCode.REPLICA_LOST, FAILURES_MAX, True),
        (ErrorCode.ENGINE_BUSY, FAILURES_MAX, False),
        (ErrorCode.ADAPTER_NOT_FOUND, 1000, False),
    ],
)
def test_faults_of_an_adapter_are_told_from_faults_of_a_node(code, failures, expected) -> None:
    assert is_fault(code, failures) == expected


def desired(*pools: str) -> agent.SyncResponse:
    """Return a desired state with a trial in each pool. Replica `r-p` belongs to pool `p`."""
    response = agent.SyncResponse()
    for pool in ("one", "two"):
        response.replicas.add(replica_id=f"r-{pool}", pool_id=pool)
    for pool in pools:
        response.trials.add(rollout_id=f"rollout-{pool}", pool_id=pool, adapter_digest=DIGEST)
    return response


async def results_of(
    attempt: Callable[[GoldenTarget, str], Awaitable[None]], wanted: agent.SyncResponse
) -> list[agent.TrialResult]:
    """Return the report when every desired trial has ended."""
    over = asyncio.Event()
    targets = [GoldenTarget(name, "127.0.0.1:1", "sim", "cd" * 32) for name in ("r-one", "r-two")]

    def changed() -> None:
        if len(trials.results()) == len(wanted.trials):
            over.set()

    trials = AdapterTrials(lambda: targets, changed, attempt)
    trials.follow(wanted)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(trials.run())
        await over.wait()
        running.cancel()
    found = trials.results()
    trials.follow(wanted)
    assert trials.results() == found, "a wanted trial is reported again"
    trials.follow(desired())
    assert trials.results() == []
    return found


async def test_each_is_tried_once_in_its_own_pool() -> None:
    tried: list[tuple[str, str]] = []

    async def attempt(target: GoldenTarget, digest: str) -> None:
        tried.append((target.replica_id, digest))
        if target.replica_id == "r-two":
            raise FailedError(ErrorCode.ADAPTER_INVALID, "127.0.0.1:1 refused: r is 32")

    found = await results_of(attempt, desired("one", "two"))
    assert sorted(tried) == [("r-one", DIGEST), ("r-two", DIGEST)]
    assert {it.rollout_id: (it.code, it.message) for it in found} == {
        "rollout-one": ("", ""),
        "rollout-two": ("adapter_invalid", "r is 32"),
    }


async def test_an_engine_that_has_no_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    left = [ErrorCode.ADAPTER_NOT_FOUND, *[ErrorCode.ENGINE_BUSY] * FAILURES_MAX]

    async def attempt(*_: object) -> None:
        if left:
            raise FailedError(left.pop(), "not now")

    (found,) = await results_of(attempt, desired("one"))
    assert (found.code, left) == ("", [])
