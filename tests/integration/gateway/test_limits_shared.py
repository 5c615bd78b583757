"""N gateways share one truth on a real Valkey: never beyond a limit, whatever happens to it."""

import asyncio
import os
import random
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import hiredis
import pytest

from cli.stack.valkey import valkey_spec
from gateway.directory import Principal
from gateway.limits import script, shared
from gateway.limits.limiter import Limiter, LimitExceededError, Reservation
from gateway.limits.valkey import ValkeyClient
from sluice.process import ChildProcess, free_port
from sluice.wire.control.v1 import control_pb2 as control
from tests.waiting import until

pytestmark = pytest.mark.real

KEY = control.ApiKey(id="k")


def caller(tenant: str = "t", key: control.ApiKey = KEY, **limits: int) -> Principal:
    return Principal(key, control.Tenant(id=tenant), control.Tier(**limits))


async def reserve(limiter: Limiter, who: Principal, tokens: int = 0) -> Reservation | None:
    """Return what was granted, or None."""
    try:
        return await limiter.reserve(
            who, "m", prompt_tokens=tokens, output_tokens_max=0, is_bounded=True
        )
    except LimitExceededError:
        return None


def settle(limiter: Limiter, reservation: Reservation, used: int = 0) -> None:
    limiter.settle(reservation, prompt_tokens=used, output_tokens=0, was_served=True)


@asynccontextmanager
async def gateway(
    url: str, *, deadline_s: float = 30.0, share: float = 0.5
) -> AsyncIterator[Limiter]:
    """One gateway's limiter, connected."""
    client = ValkeyClient(url, deadline_s=deadline_s)
    limiter = Limiter(client, local_share=share, clock=asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        await until(lambda: limiter.is_shared)
        try:
            yield limiter
        finally:
            run.cancel()


async def granted(limiter: Limiter, who: Principal) -> Reservation:
    """Ask until there is room."""
    async with asyncio.timeout(60):
        while (found := await reserve(limiter, who)) is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.002)
    return found


async def command(url: str, *words: str | bytes) -> object:
    """Ask the server something apart from any gateway."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    parser = hiredis.Reader(notEnoughData=None)
    try:
        writer.write(hiredis.pack_command(("AUTH", parts.password)) + hiredis.pack_command(words))
        replies: list[object] = []
        while len(replies) < 2:
            parser.feed(await reader.read(65536))
            while (reply := parser.gets()) is not None:
                replies.append(reply)
        return replies[1]
    finally:
        writer.close()


# Never beyond a limit.


@pytest.mark.parametrize("seed", range(6))
async def test_parallel_starts_never_overshoot(valkey, seed: int) -> None:
    """Random plans of several gateways: no limit of any scope is passed at any moment.

    Tokens may pass theirs by what answers needed beyond their reservations, and no more.
    """
    rng = random.Random(seed)
    key = control.ApiKey(id="k", rpm=30, tpm=0, requests_max=4)
    who = caller(key=key, rpm=40, tpm=2000, requests_max=rng.choice((5, 7)))
    other = caller(rpm=40, tpm=2000, requests_max=who.tier.requests_max)
    open_now = {"key": 0, "account": 0}
    started = {"key": 0, "account": 0}
    used = excess = refused = 0
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def client(limiter: Limiter) -> None:
        nonlocal used, excess, refused
        for _ in range(12):
            principal = rng.choice((who, other))
            of = ("key", "account") if principal is who else ("account",)
            need = rng.randrange(10, 120)
            reservation = await reserve(limiter, principal, need)
            if reservation is None:
                refused += 1
                continue
            for name in of:
                open_now[name] += 1
                started[name] += 1
            assert open_now["key"] <= 4
            assert open_now["account"] <= who.tier.requests_max
            minutes = (loop.time() - began_s) / 60 + 0.001
            assert started["key"] <= 30 * (1 + minutes)
            assert started["account"] <= 40 * (1 + minutes)
            await asyncio.sleep(rng.random() * 0.01)
            spent = rng.randrange(0, 200)
            used, excess = used + spent, excess + max(0, spent - need)
            assert used <= 2000 * (1 + minutes) + excess
            for name in of:
                open_now[name] -= 1
            settle(limiter, reservation, spent)

    async with AsyncExitStack() as stack:
        limiters = [await stack.enter_async_context(gateway(valkey[1])) for _ in range(3)]
        await asyncio.gather(*(client(limiter) for limiter in limiters for _ in range(5)))
        assert all(limiter.local_decisions == 0 for limiter in limiters)
    assert refused
    assert started["account"] >= 10


async def test_a_day_is_limited_beside_the_minute(valkey) -> None:
    """What a minute would grant, a day refuses; its bucket is kept for as long as it refills."""
    who = caller(rpm=1000, rpd=3)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        found = [await granted(gate, who) for gate in (one, other, one)]
        shown = found[2].headers
        assert shown["x-ratelimit-limit-requests-day"] == "3"
        assert shown["x-ratelimit-remaining-requests-day"] == "0", "and 997 of the minute's"
        with pytest.raises(LimitExceededError) as refused:
            await other.reserve(who, "m", prompt_tokens=0, output_tokens_max=0, is_bounded=True)
        assert "3 requests per day" in refused.value.message
        assert 28_000 < (refused.value.retry_after_s or 0) <= 28_800, "a third of a day"
        assert int(str(await command(valkey[1], "PTTL", "limits:{t}"))) > 86_400_000


async def test_all_of_a_tick_are_answered_each_with_its_own(valkey) -> None:
    async with gateway(valkey[1]) as limiter:
        callers = [caller(f"t{index}", rpm=1 + index % 3) for index in range(700)]
        found = await asyncio.gather(*(reserve(limiter, who) for who in callers for _ in range(3)))
    granted = [sum(one is not None for one in found[i * 3 : i * 3 + 3]) for i in range(700)]
    assert granted == [who.tier.rpm for who in callers]


async def test_limits_and_needs_as_large_as_the_wire_has_them(valkey) -> None:
    most = 2**32 - 1
    async with gateway(valkey[1]) as limiter:
        who = caller(rpm=most, tpm=most, requests_max=most)
        first = await reserve(limiter, who, 2**30)
        assert first is not None
        assert first.headers["x-ratelimit-limit-tokens"] == str(most)
        assert abs(int(first.headers["x-ratelimit-remaining-tokens"]) - (most - 2**30)) < 2**28
        settle(limiter, first, 2**31)
        second = await reserve(limiter, who, 2**40)
        assert second is None, "a need beyond the bucket waits for all of it"
        poor = caller("poor", tpm=1)
        loan = await reserve(limiter, poor, 1)
        assert loan is not None
        settle(limiter, loan, 2**31)
        with pytest.raises(LimitExceededError) as refused:
            await limiter.reserve(poor, "m", prompt_tokens=1, output_tokens_max=0, is_bounded=True)
        assert refused.value.retry_after_s == 86400


async def test_values_that_are_no_bucket_count_as_absent(valkey) -> None:
    nan = "\x00\x00\x00\x00\x00\x00\xf8\x7f"
    async with gateway(valkey[1]) as limiter:
        for index, value in enumerate(("x", nan * 3, "\x7f" * 24, nan * 6, "y" * 240)):
            who = caller(f"t{index}", rpm=2, tpm=100, requests_max=2)
            await command(valkey[1], "SET", f"limits:{{t{index}}}", value)
            found = [await reserve(limiter, who, 10) for _ in range(3)]
            assert [one is not None for one in found] == [True, True, False]
        await command(valkey[1], "HSET", "limits:{h}", "r", "0")
        assert await reserve(limiter, caller("h", rpm=2), 10)
        assert limiter.local_decisions == 0


# Gateways come and go.


async def test_a_gateway_that_dies_holds_its_requests_for_its_lease(valkey, monkeypatch) -> None:
    lease_s = 3.0  # a renewal may be late by nearly as much: the machine is busy
    monkeypatch.setattr(script, "LEASE_MS", int(lease_s * 1000))
    monkeypatch.setattr(shared, "_REFRESH_S", 0.1)
    who = caller(requests_max=2)
    async with gateway(valkey[1]) as survivor:
        async with gateway(valkey[1]) as dead:
            assert await reserve(dead, who)
            assert await reserve(dead, who)
            await asyncio.sleep(lease_s * 1.1)  # it is renewed
            assert await reserve(survivor, who) is None
        assert await reserve(survivor, who) is None, "its lease still runs"
        await granted(survivor, who)
        await granted(survivor, who)
        assert await reserve(survivor, who) is None


@pytest.mark.parametrize(
    ("before", "after", "at_once", "later"),
    [
        ({"requests_max": 90}, {"requests_max": 90, "rpm": 10}, 10, 0),
        ({"requests_max": 90, "rpm": 3}, {"requests_max": 90, "rpm": 1200}, 2, 10),
        ({"requests_max": 5}, {"requests_max": 2}, 1, 0),
        ({"requests_max": 1}, {"requests_max": 5}, 4, 0),
    ],
    ids=["rpm is new", "rpm is raised", "fewer at once", "more at once"],
)
async def test_an_open_request_does_not_undo_a_change_of_limits(
    valkey, monkeypatch, before, after, at_once, later
) -> None:
    monkeypatch.setattr(shared, "_REFRESH_S", 0.005)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        assert await reserve(other, caller(**before))
        who = caller(**after)
        found = [await reserve(one, who) for _ in range(at_once + 5)]
        assert len([it for it in found if it]) >= at_once
        await asyncio.sleep(1)  # the lease is renewed
        found += [await reserve(one, who) for _ in range(10)]
        refilled = 5 if "rpm" in after else 0
        assert 0 <= len([it for it in found if it]) - at_once - later <= refilled


async def test_requests_open_before_a_limit_count_until_they_end(valkey, monkeypatch) -> None:
    """Its gateway hears of the limit by a request that is refused because of it."""
    lease_s = 2.0
    monkeypatch.setattr(script, "LEASE_MS", int(lease_s * 1000))
    monkeypatch.setattr(shared, "_REFRESH_S", 0.1)
    before, after = caller(rpm=1000), caller(rpm=1000, requests_max=2)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        still_open = [await reserve(other, before) for _ in range(2)]
        assert await reserve(other, after) is None
        await asyncio.sleep(lease_s * 1.2)
        assert await reserve(one, after) is None
        for reservation in still_open:
            assert reservation
            settle(other, reservation)
        await granted(one, after)


async def test_a_raised_limit_pays_debts_though_others_settle_meanwhile(valkey) -> None:
    """Nobody is granted, so that refused calls alone bring the new limit: it holds at once."""
    before, after = caller(tpm=1000), caller(tpm=60_000)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        last = await reserve(one, before, 100)
        still_open = [await reserve(gate, before, 1) for _ in range(40) for gate in (one, other)]
        assert last
        settle(
            one, last, 3000
        )  # more than 2000 are owed: 2 s, and by the old limit as many minutes
        for index, reservation in enumerate(still_open):
            assert reservation
            settle((one, other)[index % 2], reservation, 2)
            await asyncio.sleep(0.1)  # no call takes it along
            if await reserve(one, after, 1):
                break
        else:
            pytest.fail("the debt was not paid")
        assert one.local_decisions == other.local_decisions == 0


async def test_a_settled_request_makes_room_everywhere(valkey) -> None:
    who = caller(requests_max=1)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        for _ in range(20):
            first = await granted(one, who)
            assert await reserve(other, who) is None
            settle(one, first)
            second = await reserve(one, who)
            assert second, "the same gateway knows at once"
            settle(one, second)
            third = await granted(other, who)
            assert await reserve(one, who) is None
            settle(other, third)
            settle(one, await granted(one, who))
            settle(other, await granted(other, who))


async def test_a_gateway_that_stops_tells_its_last_settlements(valkey) -> None:
    who = caller(tpm=100, requests_max=1)
    async with gateway(valkey[1]) as survivor:
        async with gateway(valkey[1]) as leaving:
            last = await reserve(leaving, who, 60)
            assert last
            settle(leaving, last, 30)
            await leaving.flush()
        assert await reserve(survivor, who, 70)
        assert survivor.local_decisions == 0


# The server has bad days.


async def test_a_flushed_server_learns_open_requests_again(valkey, monkeypatch) -> None:
    monkeypatch.setattr(shared, "_REFRESH_S", 0.05)
    who = caller(requests_max=2)
    async with gateway(valkey[1]) as one, gateway(valkey[1]) as other:
        first = await reserve(one, who)
        assert first
        assert await reserve(one, who)
        await command(valkey[1], "FLUSHALL")
        async with asyncio.timeout(60):  # until the server has heard of it again
            while (found := await reserve(other, who)) is not None:
                settle(other, found)
                await asyncio.sleep(0.01)
        settle(one, first)
        await granted(other, who)
        assert await reserve(other, who) is None


async def test_a_clock_set_back_costs_no_caller_more_than_its_wait(valkey) -> None:
    """Nobody is granted or settles, so that refused calls alone bring the new time."""
    url, name = valkey[1], "limits:{t}"
    async with gateway(url) as limiter:
        who = caller(rpm=60)
        while await reserve(limiter, who):
            pass
        value = await command(url, "GET", name)
        assert isinstance(value, bytes)
        (at_ms,) = struct.unpack_from("<d", value)
        later = struct.pack("<d", at_ms + 3_600_000) + value[8:]
        await command(url, "SET", name, later)
        async with asyncio.timeout(10):
            assert await granted(limiter, who), "one refills each second"
        assert await reserve(limiter, who) is None


async def test_flushed_scripts_are_sent_again(valkey) -> None:
    async with gateway(valkey[1]) as limiter:
        who = caller(rpm=2)
        assert await reserve(limiter, who)
        await command(valkey[1], "SCRIPT", "FLUSH")
        assert await reserve(limiter, who)
        assert await reserve(limiter, who) is None
        assert limiter.local_decisions == 0
        assert limiter.lost_settlements == 0


async def test_without_memory_everybody_decides_locally_until_there_is_some(valkey) -> None:
    url = valkey[1]
    async with gateway(url) as limiter:
        who = caller(rpm=10, tpm=1000)
        await command(url, "CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
        found = [await reserve(limiter, who, 100) for _ in range(12)]
        assert sum(one is not None for one in found) == 5, "half of 10"
        assert not limiter.is_shared
        await command(url, "CONFIG", "SET", "maxmemory", "256mb")
        await until(lambda: limiter.is_shared)
        later = [await reserve(limiter, who, 1) for _ in range(12)]
        assert sum(one is not None for one in later) == 5, "what was granted locally was told"


async def test_after_a_failover_the_new_primary_is_asked(valkey, tmp_path) -> None:
    """A name moves to the new server, and the old one keeps what is connected: as a replica."""
    targets = [urlsplit(valkey[1]).port]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", targets[-1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pour(reader, there[1]))
            tasks.create_task(pour(there[0], writer))

    port = free_port()
    child = await ChildProcess.start(
        valkey_spec(port, tmp_path / "new", tmp_path / "new.log", {}, password="test-secret_1")
    )
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    name = valkey[1].replace(f":{targets[0]}", f":{server.sockets[0].getsockname()[1]}")
    try:
        await child.wait_ready(60)
        async with server, gateway(name) as limiter:
            who = caller(rpm=10)
            assert await reserve(limiter, who)
            targets.append(port)
            await command(valkey[1], "REPLICAOF", "127.0.0.1", str(port))
            assert await reserve(limiter, who), "its share, alone"
            assert limiter.local_decisions == 1
            await until(lambda: limiter.is_shared)
            later = [await reserve(limiter, who) for _ in range(12)]
            assert sum(one is not None for one in later) == 9, "what it granted alone was told"
            assert limiter.local_decisions == 1
    finally:
        await child.stop()


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(65536):
            writer.write(content)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_a_frozen_server_costs_the_deadline_once(valkey) -> None:
    child, url = valkey
    loop = asyncio.get_running_loop()
    async with gateway(url, deadline_s=1.5, share=1.0) as limiter:
        who = caller(rpm=100_000)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            began_s = loop.time()
            assert await reserve(limiter, who)
            assert loop.time() - began_s >= 1.4
            for _ in range(199):
                with pytest.raises(StopIteration) as ended:  # it waits for nothing
                    reserve(limiter, who).send(None)
                assert ended.value.value
            await asyncio.sleep(1.5)  # it gives the connection up and gets no other
            assert await reserve(limiter, who)
            assert limiter.local_decisions == 201
        finally:
            os.kill(child.pid, signal.SIGCONT)
        await until(lambda: limiter.is_shared)
        assert await reserve(limiter, who)
        assert limiter.local_decisions == 201


async def test_a_restarted_server_learns_open_requests_and_past_use(valkey) -> None:
    child, url = valkey
    async with gateway(url) as limiter:
        who = caller(rpm=10, requests_max=4)
        for _ in range(3):
            assert await reserve(limiter, who)
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: not limiter.is_shared)
        assert await reserve(limiter, who) is None, "3 are open, half of 4 may be"
        await child.stop()
        again = await type(child).start(child.spec)
        try:
            await again.wait_ready(60)
            await until(lambda: limiter.is_shared)
            assert await reserve(limiter, who)
            assert await reserve(limiter, who) is None
        finally:
            await again.stop()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad\r\n\r\n", b"*3\r\n:1\r\n", b":7\r\n", b""])
async def test_a_server_that_answers_garbage(answer: bytes) -> None:
    """The greeting is right, what follows is not."""

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            is_greeting = b"PING" in data
            self.transport.write(b"+PONG\r\n" if is_greeting else answer)
            if not is_greeting:
                self.transport.close()

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = ValkeyClient(f"redis://127.0.0.1:{port}", deadline_s=0.05)
    limiter = Limiter(client, local_share=0.5, clock=asyncio.get_running_loop().time)
    async with server, asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        found = []
        for index in range(30):
            found.append(await reserve(limiter, caller(rpm=20)))
            if index < 10:
                await asyncio.sleep(0.05)
        assert sum(one is not None for one in found) == 10
        assert not limiter.is_shared
        run.cancel()


async def test_a_wrong_password_is_no_hang(valkey) -> None:
    client = ValkeyClient(valkey[1].replace("test-secret_1", "wrong"))
    limiter = Limiter(client, local_share=0.5, clock=asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        await asyncio.sleep(0.3)
        assert not client.is_connected
        assert await reserve(limiter, caller(rpm=2))
        assert await reserve(limiter, caller(rpm=2)) is None
        run.cancel()
