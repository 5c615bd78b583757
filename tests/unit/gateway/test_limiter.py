"""What a limiter takes it gives back, whoever leaves, and whatever the server answers."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest
from redis.exceptions import NoScriptError, OutOfMemoryError

from gateway.directory import Principal
from gateway.limits import shared
from gateway.limits.limiter import Limiter, LimitExceededError, Reservation
from gateway.limits.verdict import SHOWN, UNLIMITED, VERDICT
from sluice.errors import ErrorCode
from sluice.limits import BY_NAME
from sluice.wire.control.v1 import control_pb2 as control
from tests.unit.gateway.limit_rows import LimitRow, limit_rows

if TYPE_CHECKING:
    from gateway.limits.valkey import ValkeyClient

PRINCIPAL = Principal(
    control.ApiKey(id="k"), control.Tenant(id="t"), control.Tier(rpm=10, tpm=1000, requests_max=3)
)
BY_THE_MINUTE = Principal(
    control.ApiKey(id="l"), control.Tenant(id="u"), control.Tier(rpm=10, tpm=1000)
)


def reply(refused_by: str = "", wait_ms: int = 0, **rests: float) -> bytes:
    """Return the answer to a call, of its first scope alone."""
    number = BY_NAME[refused_by].number if refused_by else 0
    left = [rests.get(kind.name, UNLIMITED) for kind in SHOWN]
    return VERDICT.pack(number, 0, wait_ms, *(0 for _ in SHOWN), *left)


GRANTED = reply(rpm=9, tpm=700)


class Valkey:
    """Keeps what is sent; the test answers."""

    deadline_s = 60.0

    def __init__(self) -> None:
        self.sent: list[Sequence[bytes | int]] = []
        self.is_connected = True
        self.dropped = ""

    def listen(self, listener: object) -> None:
        self.listener = listener

    def send(self, words: Sequence[bytes | int]) -> None:
        self.sent.append(words)

    def drop(self, reason: str) -> None:
        self.dropped = reason


def told(words: Sequence[bytes | int], tenant_id: str = "t") -> LimitRow:
    """Return the row of an account in a batch."""
    count = cast("int", words[2])
    place = words[3 : 3 + count].index(b"limits:{%b}" % tenant_id.encode())
    return limit_rows(cast("bytes", words[5 + count]))[place]


async def ready() -> tuple[Valkey, Limiter]:
    valkey = Valkey()
    limiter = Limiter(cast("ValkeyClient", valkey), local_share=0.5, clock=lambda: 0.0)
    valkey.listener.connected()
    assert not limiter.is_shared, "the probe is not answered yet"
    valkey.listener.replied(b"")
    assert limiter.is_shared
    valkey.sent.clear()
    return valkey, limiter


async def reserve(
    limiter: Limiter, tokens: int = 300, principal: Principal = PRINCIPAL
) -> Reservation:
    return await limiter.reserve(
        principal, "m", prompt_tokens=tokens, output_tokens_max=0, is_bounded=True
    )


async def sent(valkey: Valkey, batches: int) -> None:
    async with asyncio.timeout(5):
        while len(valkey.sent) < batches:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_reply_first", [False, True])
@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_client_that_leaves_while_its_reservation_is_made(
    is_granted: bool, is_reply_first: bool
) -> None:
    valkey, limiter = await ready()
    answer = GRANTED if is_granted else reply("tpm", 5000, rpm=9, tpm=0)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        if is_reply_first:
            valkey.listener.replied(answer)
        task.cancel()
        await asyncio.wait([task])
        if not is_reply_first:
            valkey.listener.replied(answer)
        assert task.cancelled()
    if not is_granted:
        assert len(valkey.sent) == 1
        return
    await sent(valkey, 2)
    row = told(valkey.sent[1])
    assert (row.held, row.back_requests, row.back_tokens) == (0, 1, 300)


async def test_a_reservation_is_settled_once() -> None:
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        valkey.listener.replied(GRANTED)
    reservation = task.result()
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "700"
    for output_tokens in (50, 1000):
        limiter.settle(reservation, prompt_tokens=300, output_tokens=output_tokens, was_served=True)
    await sent(valkey, 2)
    row = told(valkey.sent[1])
    assert (row.held, row.back_requests, row.back_tokens) == (0, 0, -50)


async def test_a_settlement_leaves_with_the_next_call_and_keeps_none_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "_CHANGES_PACE_S", 3600.0)
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        placed = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        valkey.listener.replied(GRANTED)
        await asyncio.wait([placed])
        limiter.settle(placed.result(), prompt_tokens=300, output_tokens=0, was_served=True)
        await sent(valkey, 2)
        valkey.listener.replied(b"")  # from now on nobody's place is news
        valkey.sent.clear()
        first = tasks.create_task(reserve(limiter, principal=BY_THE_MINUTE))
        await sent(valkey, 1)
        valkey.listener.replied(GRANTED)
        await asyncio.wait([first])
        limiter.settle(first.result(), prompt_tokens=300, output_tokens=50, was_served=True)
        await asyncio.sleep(0.01)
        assert len(valkey.sent) == 1
        tasks.create_task(reserve(limiter, 1, BY_THE_MINUTE))
        await sent(valkey, 2)
        assert told(valkey.sent[1], "u").back_tokens == -50
        valkey.listener.replied(GRANTED)


@pytest.mark.parametrize("is_batch_under_way", [False, True])
async def test_a_place_that_gets_free_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, is_batch_under_way: bool
) -> None:
    """Who keeps to the limit of requests at once may come back at another gateway."""
    monkeypatch.setattr(shared, "_CHANGES_PACE_S", 3600.0)
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        valkey.listener.replied(GRANTED)
        await asyncio.wait([first])
        if is_batch_under_way:
            other = tasks.create_task(reserve(limiter, principal=BY_THE_MINUTE))
            await sent(valkey, 2)
        limiter.settle(first.result(), prompt_tokens=300, output_tokens=0, was_served=True)
        if is_batch_under_way:
            valkey.listener.replied(GRANTED)
            await asyncio.wait([other])
        await sent(valkey, 2 + is_batch_under_way)
        assert told(valkey.sent[-1]).held == 0
        valkey.listener.replied(b"")


async def test_calls_wait_for_the_batch_under_way_and_leave_together() -> None:
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        others = [tasks.create_task(reserve(limiter, 1)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert len(valkey.sent) == 1
        valkey.listener.replied(GRANTED)
        await sent(valkey, 2)
        assert first.done()
        assert told(valkey.sent[1]).held == 1
        valkey.listener.replied(GRANTED * 2)
    assert all(not task.result().is_local for task in others)


async def test_an_unknown_script_is_sent_in_full_and_the_calls_still_count() -> None:
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        valkey.listener.refused(NoScriptError("No matching script."))
        assert valkey.sent[1][0] == b"EVAL"
        valkey.listener.replied(GRANTED)
    assert not task.result().is_local


@pytest.mark.parametrize("failure", ["refused", "garbage", "disconnected"])
async def test_failing_calls_decide_locally_and_delay_no_other(failure: str) -> None:
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter))
        await sent(valkey, 1)
        if failure == "refused":
            valkey.listener.refused(OutOfMemoryError("command not allowed"))
        else:
            if failure == "garbage":
                valkey.listener.replied(b"nonsense")
                assert valkey.dropped
            valkey.is_connected = False
            valkey.listener.disconnected()
    assert task.result().is_local
    assert not limiter.is_shared
    with pytest.raises(LimitExceededError):
        await reserve(limiter, 1)  # at once: one request is open, half of 3 may be
    assert limiter.local_decisions == 2


async def test_local_grants_are_reported_later_and_count_as_open() -> None:
    valkey, limiter = await ready()
    valkey.is_connected = False
    valkey.listener.disconnected()
    reservation = await reserve(limiter)
    assert reservation.is_local
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "200", "half of 1000, less 300"
    with pytest.raises(LimitExceededError) as refused:
        await reserve(limiter, 1)
    assert refused.value.code == ErrorCode.RATE_LIMIT_CONCURRENCY, "half of 3"
    valkey.sent.clear()
    valkey.is_connected = True
    valkey.listener.connected()
    row = told(valkey.sent[0])
    assert (row.held, row.untold_requests, row.untold_tokens) == (1, 1, 300)
    valkey.listener.replied(b"")
    limiter.settle(reservation, prompt_tokens=300, output_tokens=100, was_served=True)
    await sent(valkey, 2)
    assert (told(valkey.sent[1]).held, told(valkey.sent[1]).untold_tokens) == (0, 100)


@pytest.mark.parametrize("failure", ["refused", "disconnected"])
@pytest.mark.parametrize("principal", [PRINCIPAL, BY_THE_MINUTE])
async def test_open_requests_are_reported_by_the_first_batch_too(
    principal: Principal, failure: str
) -> None:
    """Otherwise others are granted from full buckets until the last of these answers ends."""
    valkey, limiter = await ready()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter, principal=principal))
        await sent(valkey, 1)
        if failure == "refused":
            valkey.listener.refused(OutOfMemoryError("command not allowed"))
        else:
            valkey.listener.disconnected()
    assert task.result().is_local
    valkey.sent.clear()
    if failure == "disconnected":
        valkey.listener.connected()
    await sent(valkey, 1)
    row = told(valkey.sent[0], principal.tenant.id)
    assert (row.held, row.untold_requests, row.untold_tokens) == (1, 1, 300)


async def test_a_probe_touches_no_tenant_of_any_name() -> None:
    valkey, limiter = await ready()
    valkey.listener.disconnected()
    of_the_name = Principal(control.ApiKey(id="k"), control.Tenant(id="probe"), PRINCIPAL.tier)
    await reserve(limiter, principal=of_the_name)
    valkey.sent.clear()
    valkey.listener.connected()
    assert valkey.sent[0].count(b"limits:{probe}") == 1
    assert told(valkey.sent[0], "probe").limits["tpm"] == 1000


@pytest.mark.parametrize(("tpm", "taken"), [(0, 0), (100, 100), (1000, 300)])
@pytest.mark.parametrize("is_local", [False, True])
async def test_the_returned_tokens_equal_the_taken_ones_after_a_change_of_limits(
    tpm: int, taken: int, is_local: bool
) -> None:
    valkey, limiter = await ready()
    before, after = (
        Principal(PRINCIPAL.key, PRINCIPAL.tenant, control.Tier(rpm=10, tpm=limit))
        for limit in (tpm, 2000)
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reserve(limiter, principal=before))
        await sent(valkey, 1)
        if is_local:
            valkey.listener.disconnected()
        else:
            valkey.listener.replied(GRANTED)
    valkey.sent.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reserve(limiter, 0, after))
        await asyncio.sleep(0)
        limiter.settle(task.result(), prompt_tokens=20, output_tokens=0, was_served=True)
        if is_local:
            valkey.listener.connected()
        await sent(valkey, 1)
        valkey.listener.replied(b"" if is_local else GRANTED)
    row = told(valkey.sent[0])
    if is_local:
        assert (row.untold_tokens, row.back_tokens) == (20, 0)
    else:
        assert row.back_tokens == taken - 20


@pytest.mark.parametrize("is_reply_first", [False, True])
async def test_a_leaving_caller_returns_its_tokens_after_a_change_of_limits(
    is_reply_first: bool,
) -> None:
    valkey, limiter = await ready()
    before, after = (
        Principal(PRINCIPAL.key, PRINCIPAL.tenant, control.Tier(rpm=10, tpm=tpm))
        for tpm in (100, 2000)
    )
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(reserve(limiter, 300, before))
        await sent(valkey, 1)
        staying = tasks.create_task(reserve(limiter, 1, after))
        await asyncio.sleep(0)
        if is_reply_first:
            valkey.listener.replied(GRANTED)
        leaving.cancel()
        await asyncio.wait([leaving])
        if not is_reply_first:
            valkey.listener.replied(GRANTED)
        await sent(valkey, 2)
        valkey.listener.replied(GRANTED)
    assert leaving.cancelled()
    assert staying.result()
    assert told(valkey.sent[1]).back_tokens == 100


@pytest.mark.parametrize("is_local", [False, True])
async def test_the_returned_tokens_follow_the_limit_at_the_time_of_the_request(
    is_local: bool,
) -> None:
    """A caller that was bound before a change asks again after it."""
    valkey, limiter = await ready()
    early, later = (  # by their own keys: the first stays bound
        Principal(control.ApiKey(id=key), PRINCIPAL.tenant, control.Tier(rpm=10, tpm=tpm))
        for key, tpm in (("k", 1000), ("l", 100))
    )
    found: list[Reservation] = []
    for principal in (early, later, early):
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(reserve(limiter, 300, principal))
            await sent(valkey, 1)
            valkey.listener.replied(GRANTED)
        valkey.sent.clear()
        found.append(task.result())
    if is_local:
        valkey.listener.disconnected()
        found.append(await reserve(limiter, 300, early))
        valkey.sent.clear()
    limiter.settle(found[-1], prompt_tokens=20, output_tokens=0, was_served=True)
    if is_local:
        valkey.listener.connected()
    await sent(valkey, 1)
    row = told(valkey.sent[0])
    assert (row.untold_tokens, row.back_tokens) == ((20, 0) if is_local else (0, 80))


@pytest.mark.parametrize(
    ("limit", "code", "words"),
    [
        ("rpm", "rate_limit_requests", "10 requests per minute"),
        ("tpm", "rate_limit_tokens", "1000 tokens per minute"),
        ("requests_max", "rate_limit_concurrency", "at most 3"),
    ],
)
async def test_a_refusal_names_the_limit_and_its_owner(limit: str, code: str, words: str) -> None:
    valkey, limiter = await ready()
    answer = reply(limit, 2500, rpm=3, tpm=-250)
    asyncio.get_running_loop().call_later(0.01, valkey.listener.replied, answer)
    with pytest.raises(LimitExceededError) as refused:
        await reserve(limiter)
    error = refused.value
    assert (error.code, error.retry_after_s) == (code, 2.5)
    assert words in error.message
    assert "your account" in error.message
    assert error.headers == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "42s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m15s",
    }


async def test_callers_without_limits_cause_no_call() -> None:
    valkey, limiter = await ready()
    free = Principal(control.ApiKey(id="k"), control.Tenant(id="t"), control.Tier())
    reservation = await limiter.reserve(
        free, "m", prompt_tokens=9, output_tokens_max=9, is_bounded=True
    )
    limiter.settle(reservation, prompt_tokens=9, output_tokens=9, was_served=True)
    await asyncio.sleep(0)
    assert reservation.headers == {}
    assert valkey.sent == []


async def answered(valkey: Valkey, limiter: Limiter, tokens_max: int, answers: int) -> Reservation:
    """Reserve for answers nothing else is known of."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            limiter.reserve(
                PRINCIPAL,
                "m",
                prompt_tokens=1,
                output_tokens_max=tokens_max,
                is_bounded=True,
                answers=answers,
            )
        )
        await sent(valkey, 1)
        valkey.listener.replied(GRANTED)
    valkey.sent.clear()
    return task.result()


async def settled(valkey: Valkey, limiter: Limiter, found: Reservation, tokens: int) -> None:
    limiter.settle(found, prompt_tokens=1, output_tokens=tokens, was_served=True)
    await sent(valkey, 1)
    valkey.listener.replied(b"")
    valkey.sent.clear()


async def test_the_forecast_of_an_answer_is_the_length_of_earlier_ones() -> None:
    valkey, limiter = await ready()
    for answers in (1, 1, 1, 4, 1):
        found = await answered(valkey, limiter, 1000, answers)
        await settled(valkey, limiter, found, 20 * answers)
    one = await answered(valkey, limiter, 1000, 1)
    assert 20 <= one.tokens - 1 < 30
    eight = await answered(valkey, limiter, 8000, 8)
    assert eight.tokens - 1 == 8 * (one.tokens - 1)


async def test_an_answer_without_tokens_teaches_nothing() -> None:
    valkey, limiter = await ready()
    found = await answered(valkey, limiter, 1000, 1)
    await settled(valkey, limiter, found, 20)
    before = await answered(valkey, limiter, 1000, 1)
    for tokens_max in (0, 1000) * 15:  # tokenizing, say, and what an engine refused
        found = await answered(valkey, limiter, tokens_max, 1)
        await settled(valkey, limiter, found, 0)
    after = await answered(valkey, limiter, 1000, 1)
    assert after.tokens == before.tokens
