"""Texts reach the replicas of their pool, and others when those are lost, over real gRPC."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from gateway.embedding import embedders as module
from gateway.embedding import standing as standing_module
from gateway.embedding.embedders import ATTEMPTS_MAX, IN_FLIGHT_MAX, WINDOW_TEXTS, Embedders
from sluice.errors import BadRequestError, ErrorCode, FailedError, RejectedError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control
from tests.support.scripted_embedder import (
    ScriptedEmbedder,
    ready_replica,
    serve_embedder,
    vector_of,
)
from tests.waiting import until

POOL = "pool"


class Fleet:
    """Scripted replicas, what the control plane says of them, and the embedders that use them."""

    def __init__(self, count: int) -> None:
        self.replicas = [ScriptedEmbedder() for _ in range(count)]
        self.servers = [AsyncExitStack() for _ in range(count)]
        self.state = ControlState()
        self.embedders = Embedders(self.state)

    def tell(self, number: int, state: control.ReplicaState) -> None:
        told = control.Replica()
        told.CopyFrom(self.state.replicas[f"r{number}"])
        told.state = state
        self.state.replicas[told.id] = told
        self.embedders.update()

    async def embed(
        self, *texts, within_s: float = 30.0, is_highest: bool = True
    ) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        begun: list[int] = []

        def take(index, vector) -> None:
            assert index not in found
            assert index in begun
            found[index] = list(vector)

        give_up_at_s = asyncio.get_running_loop().time() + within_s
        await self.embedders.embed(
            POOL, texts, begun.append, take, give_up_at_s=give_up_at_s, is_highest=is_highest
        )
        assert begun == list(range(len(texts)))
        return [found[index] for index in range(len(texts))]


@asynccontextmanager
async def fleet(count: int):
    made = Fleet(count)
    async with AsyncExitStack() as stack:
        for number, (replica, server) in enumerate(zip(made.replicas, made.servers, strict=True)):
            await stack.enter_async_context(server)
            address = await server.enter_async_context(serve_embedder(replica))
            made.state.replicas[f"r{number}"] = ready_replica(f"r{number}", POOL, address)
        made.embedders.update()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.embedders.run())
            yield made
            assert made.embedders.open == 0
            running.cancel()


def expected(*texts) -> list[list[float]]:
    return [list(vector_of(text, 8)) for text in texts]


async def test_order_is_kept_and_all_replicas_work() -> None:
    async with fleet(3) as world:
        texts = [(number, number + 1) for number in range(200)]
        assert await world.embed(*texts) == expected(*texts)
        shares = [len(replica.texts) for replica in world.replicas]
        assert sum(shares) == 200
        assert min(shares) > 40


async def test_one_request_has_a_bounded_number_of_texts_under_way() -> None:
    async with fleet(1) as world:
        (replica,) = world.replicas
        replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed(*[(n,) for n in range(100)]))
            await until(lambda: len(replica.texts) == WINDOW_TEXTS)
            await asyncio.sleep(0.05)
            assert len(replica.texts) == WINDOW_TEXTS
            replica.answers.set()
            assert await call == expected(*[(n,) for n in range(100)])


async def test_an_oversized_input_is_refused_before_anything_is_sent() -> None:
    async with fleet(1) as world:
        (replica,) = world.replicas
        replica.answers.clear()
        big = [(n,) for n in range(WINDOW_TEXTS)]
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(world.embed(*big)) for _ in range(IN_FLIGHT_MAX // WINDOW_TEXTS)
            ]
            await until(lambda: len(replica.texts) == IN_FLIGHT_MAX)
            with pytest.raises(RejectedError) as caught:
                await world.embed((1,))
            assert caught.value.code is ErrorCode.QUEUE_FULL
            assert caught.value.retry_after_s
            replica.answers.set()
            for call in calls:
                assert await call == expected(*big)
        assert await world.embed((1,)) == expected((1,))


async def test_lower_tiers_leave_a_quarter_of_the_places_to_the_highest_one() -> None:
    async with fleet(1) as world:
        (replica,) = world.replicas
        replica.answers.clear()
        big = [(n,) for n in range(WINDOW_TEXTS)]
        places = IN_FLIGHT_MAX * 3 // 4
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(world.embed(*big, is_highest=False))
                for _ in range(places // WINDOW_TEXTS)
            ]
            await until(lambda: len(replica.texts) == places)
            with pytest.raises(RejectedError) as caught:
                await world.embed((1,), is_highest=False)
            assert caught.value.code is ErrorCode.QUEUE_FULL
            top = tasks.create_task(world.embed((1,)))
            await until(lambda: len(replica.texts) == places + 1)
            replica.answers.set()
            assert await top == expected((1,))
            for call in calls:
                assert await call == expected(*big)


async def test_a_killed_replica_costs_no_request() -> None:
    async with fleet(2) as world:
        world.replicas[0].answers.clear()
        texts = [(n, 7) for n in range(60)]
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed(*texts))
            await until(lambda: world.replicas[0].texts)
            await world.servers[0].aclose()
            assert await call == expected(*texts)
        assert await world.embed(*texts) == expected(*texts)


async def test_a_frozen_replica_is_left_when_another_can_go_on(monkeypatch) -> None:
    monkeypatch.setattr(module, "NAP_S", 0.01)
    async with fleet(2) as world:
        world.replicas[0].answers.clear()
        texts = [(n, 7) for n in range(60)]
        assert await world.embed(*texts) == expected(*texts)
        assert world.replicas[0].texts
        await until(lambda: world.replicas[0].cancelled == len(world.replicas[0].texts))


async def test_the_only_replica_is_not_left_for_being_slow(monkeypatch) -> None:
    monkeypatch.setattr(module, "NAP_S", 0.005)
    async with fleet(1) as world:
        world.replicas[0].delay_s = 0.3  # of which a fifth would be silence
        assert await world.embed((1,)) == expected((1,))
        assert len(world.replicas[0].texts) == 1


async def test_a_replica_that_the_agent_gave_up_is_left_at_once() -> None:
    async with fleet(2) as world:
        world.replicas[0].answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed((1,), (2,)))
            await until(lambda: world.replicas[0].texts)
            world.tell(0, control.REPLICA_STATE_FAILED)
            assert await call == expected((1,), (2,))


async def test_a_draining_replica_finishes_and_gets_nothing_new() -> None:
    async with fleet(2) as world:
        world.replicas[0].answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed((1,), (2,)))
            await until(lambda: world.replicas[0].texts)
            world.tell(0, control.REPLICA_STATE_DRAINING)
            assert await world.embed((3,), (4,)) == expected((3,), (4,))
            assert len(world.replicas[0].texts) == 1
            world.replicas[0].answers.set()
            assert await call == expected((1,), (2,))


async def test_a_replica_with_a_silent_agent_still_serves() -> None:
    async with fleet(1) as world:
        world.tell(0, control.REPLICA_STATE_LOST)
        assert await world.embed((1,)) == expected((1,))


async def test_without_any_replica_the_answer_comes_at_once_and_says_when_to_return() -> None:
    async with fleet(1) as world:
        await world.servers[0].aclose()
        with pytest.raises(FailedError) as failed:
            await world.embed((1,))
        assert failed.value.code is ErrorCode.UNAVAILABLE
        assert "127.0.0.1" not in failed.value.message
        with pytest.raises(RejectedError) as refused:
            await world.embed((1,))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        world.tell(0, control.REPLICA_STATE_STOPPED)
        with pytest.raises(RejectedError) as nobody:
            await world.embed((1,))
        assert nobody.value.code is ErrorCode.NO_CAPACITY
        assert all(caught.value.retry_after_s for caught in (failed, refused, nobody))


async def test_a_replica_that_its_agent_restarted_is_trusted_again() -> None:
    async with fleet(1) as world:
        replica = world.replicas[0]
        replica.failure = (grpc.StatusCode.UNAVAILABLE, "going")
        with pytest.raises(FailedError):
            await world.embed((1,))
        replica.failure = None
        world.tell(0, control.REPLICA_STATE_STARTING)
        world.tell(0, control.REPLICA_STATE_READY)
        assert await world.embed((1,)) == expected((1,))


async def test_a_bad_text_ends_its_request_and_harms_no_other() -> None:
    async with fleet(1) as world:
        replica = world.replicas[0]
        replica.failure = (grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded: too long")
        for _ in range(5):
            with pytest.raises(BadRequestError) as caught:
                await world.embed(*[(n,) for n in range(50)])
            assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        replica.failure = None
        assert await world.embed((1,)) == expected((1,))


async def test_texts_beside_one_that_broke_an_engine_are_computed_elsewhere() -> None:
    async with fleet(2) as world:
        world.replicas[0].failure = (grpc.StatusCode.INTERNAL, "the stub process is not healthy")
        texts = [(n,) for n in range(60)]
        assert await world.embed(*texts) == expected(*texts)


async def test_a_failure_of_one_engine_is_not_the_text_s_and_of_two_it_is() -> None:
    async with fleet(4) as world:
        for replica in world.replicas:
            replica.failure = (grpc.StatusCode.INTERNAL, "the graph call failed")
        with pytest.raises(FailedError) as caught:
            await world.embed((1,))
        assert caught.value.code is ErrorCode.ENGINE_FAILED
        assert sum(len(replica.texts) for replica in world.replicas) == ATTEMPTS_MAX


async def test_a_client_that_leaves_takes_its_texts_along() -> None:
    async with fleet(1) as world:
        (replica,) = world.replicas
        replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed(*[(n,) for n in range(100)]))
            await until(lambda: len(replica.texts) == WINDOW_TEXTS)
            call.cancel()
        await until(lambda: replica.cancelled == WINDOW_TEXTS)
        assert world.embedders.open == 0
        replica.answers.set()
        assert await world.embed((1,)) == expected((1,))


async def test_the_deadline_of_a_request_is_not_held_against_a_replica() -> None:
    async with fleet(1) as world:
        world.replicas[0].delay_s = 0.5
        with pytest.raises(FailedError) as caught:
            await world.embed((1,), (2,), within_s=0.05)
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
        world.replicas[0].delay_s = 0.0
        assert await world.embed((1,)) == expected((1,))


async def test_draining_waits_for_running_work() -> None:
    async with fleet(1) as world:
        (replica,) = world.replicas
        replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed((1,), (2,)))
            await until(lambda: len(replica.texts) == 2)
            assert await world.embedders.drain(0.01) == 2
            drained = tasks.create_task(world.embedders.drain(20.0))
            with pytest.raises(RejectedError) as refused:
                await world.embed((3,))
            assert refused.value.code is ErrorCode.DRAINING
            replica.answers.set()
            assert await drained == 0
            assert await call == expected((1,), (2,))
        assert await world.embedders.drain(0.0) == 0


@pytest.mark.parametrize("count", [1, 3], ids=["none to go to", "others to go to"])
async def test_requests_still_running_at_the_final_stop_are_refused_and_not_sent_elsewhere(
    count,
) -> None:
    async with fleet(count) as world:
        for replica in world.replicas:
            replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(refusal(world, *texts)) for texts in ([(7,)], [(1,)] * 50)]
            await until(lambda: sum(len(it.texts) for it in world.replicas) == 1 + WINDOW_TEXTS)
            world.embedders.stop_all()
        assert [call.result() for call in calls] == [ErrorCode.DRAINING] * 2
        assert await refusal(world, (2,)) == ErrorCode.DRAINING
        assert sum(len(replica.texts) for replica in world.replicas) == 1 + WINDOW_TEXTS
        assert world.embedders.usable == count, "nobody is blamed"


async def refusal(world: Fleet, *texts) -> ErrorCode:
    with pytest.raises(RejectedError) as caught:
        await world.embed(*texts)
    return caught.value.code


async def test_silence_sends_texts_to_a_trusted_replica_only(monkeypatch) -> None:
    monkeypatch.setattr(module, "NAP_S", 0.005)
    monkeypatch.setattr(standing_module, "PAUSE_FIRST_S", 0.01)
    async with fleet(2) as world:
        first, second = world.replicas
        for replica in world.replicas:
            replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(world.embed((9,)))
            await until(lambda: first.texts and second.texts)  # the first was silent
            await until(lambda: len(first.texts) == 2)  # a probe, which it does not answer
            assert first.texts == [(9,), (1, 2, 3, 4)]
            assert second.texts == [(9,)]
            second.answers.set()
            assert await call == expected((9,))


async def test_a_replica_that_answers_a_probe_is_trusted_again(monkeypatch) -> None:
    monkeypatch.setattr(module, "NAP_S", 0.005)
    monkeypatch.setattr(standing_module, "PAUSE_FIRST_S", 0.01)
    async with fleet(1) as world:
        world.replicas[0].failure = (grpc.StatusCode.UNAVAILABLE, "going")
        with pytest.raises(FailedError):
            await world.embed((1,))
        assert world.embedders.usable == 0
        await until(lambda: len(world.replicas[0].texts) > 2)
        world.replicas[0].failure = None
        await until(lambda: world.embedders.usable == 1)
        assert await world.embed((1,)) == expected((1,))
