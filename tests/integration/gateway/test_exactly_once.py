"""Whatever happens to an accepted request: one reservation, one settlement, one event."""

import asyncio
import gc
import random
import weakref

import pytest

from gateway.dialects.dialect import Dialect
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.chat_task import ChatTask
from gateway.limits.limiter import Limiter
from sluice.events import EventProducer
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
FAILED = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="engine_failed", message="no")
FULL = wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="queue_full", message="full")
EVICTED = wire.Outcome(kind=wire.OUTCOME_KIND_EVICTED, code="deadline_exceeded")


class Ledger:
    """What limits and events were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.settled, self.events = [], [], []
        reserve, settle = Limiter.reserve, Limiter.settle

        async def reserving(limiter, principal, model_id, **options):
            reservation = await reserve(limiter, principal, model_id, **options)
            self.reserved.append((reservation, model_id))
            return reservation

        def settling(limiter, reservation, **used):
            self.settled.append((reservation, used))
            settle(limiter, reservation, **used)

        monkeypatch.setattr(Limiter, "reserve", reserving)
        monkeypatch.setattr(Limiter, "settle", settling)
        monkeypatch.setattr(
            EventProducer,
            "emit",
            lambda _, payload: self.events.append(RequestEvent.FromString(payload)),
        )

    @property
    def is_balanced(self) -> bool:
        """Whether every reservation was settled."""
        return {id(it) for it, _ in self.reserved} == {id(it) for it, _ in self.settled}

    def check(self, *models: str) -> None:
        """One settlement for each reservation, of these models in this order; one event."""
        assert [model for _, model in self.reserved] == list(models)
        assert [id(it) for it, _ in self.reserved] == [id(it) for it, _ in self.settled]
        assert len(self.events) == 1


@pytest.fixture
def ledger(monkeypatch) -> Ledger:
    return Ledger(monkeypatch)


def number_of(submit: wire.Submit) -> int:
    _, _, number = submit.request_id.partition("-")
    return int(number or 0)


async def stand_in(w, eventually, name: str, instead: str, **tier: int) -> None:
    """Let the model `instead` stand in for `name`, with these limits of the tier."""
    objects = w.feed.objects
    next(it for it in objects.tenants if it.id == "one").fallbacks[name] = instead
    free = next(it for it in objects.tiers if it.id == "free")
    for field, value in tier.items():
        setattr(free, field, value)
    w.feed.replace(objects)
    await eventually(lambda: w.gateway.watcher.state.tenants["one"].fallbacks)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_several_answers_to_several_prompts(world, ledger, is_stream: bool) -> None:
    async with world() as w, w.http() as http:
        w.router.plan = lambda s: Plan([[t] for t in w.ids(f"answer {number_of(s)}")])
        prompts = ["one", "and two"]
        body = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 50, "stream": is_stream}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        ledger.check("tiny")
        assert ledger.events[0].requested_model == ledger.events[0].model == "tiny"
        prompt_tokens = sum(len(w.ids(prompt)) for prompt in prompts)
        output_tokens = sum(len(w.ids(f"answer {index}")) for index in range(4))
        used = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "was_served": True}
        assert ledger.settled[0][1] == used
        event = ledger.events[0]
        assert (event.prompt_tokens, event.output_tokens) == (prompt_tokens, output_tokens)
        assert (event.outcome, event.status) == ("length", 200)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_refusal(world, ledger, is_stream: bool, n: int) -> None:
    async with world() as w, w.http() as http:
        w.router.plan = lambda _: Plan([], FAILED)
        body = {"model": "tiny", "messages": HELLO, "n": n, "stream": is_stream}
        assert (await http.post(CHAT, json=body)).status_code == 502
        ledger.check("tiny")
        assert not ledger.settled[0][1]["was_served"]
        assert (ledger.events[0].outcome, ledger.events[0].status) == ("engine_failed", 502)
        assert w.gateway.dispatcher.open == 0


async def test_a_refusal_of_one_of_several_streams(world, ledger, eventually) -> None:
    async with world() as w, w.http() as http:
        w.router.plan = lambda s: (
            Plan([[40]] * 10_000, None) if number_of(s) == 0 else Plan([], FAILED)
        )
        body = {"model": "tiny", "messages": HELLO, "n": 3, "stream": True}
        response = await http.post(CHAT, json=body)
        assert response.text.count("engine_failed") == 1
        assert "[DONE]" not in response.text
        ledger.check("tiny")
        assert ledger.settled[0][1]["was_served"]
        assert ledger.settled[0][1]["output_tokens"] > 0
        assert (ledger.events[0].outcome, ledger.events[0].status) == ("engine_failed", 200)
        await eventually(lambda: w.router.cancelled)


async def test_a_sign_of_life_is_not_the_first_token(world, ledger) -> None:
    async with world(keep_alive_s=0.05) as w, w.http() as http:
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        w.router.plan = lambda _: Plan([[]] * 200 + [[40]])
        assert ": keep-alive" in (await http.post(CHAT, json=body)).text
        ledger.check("tiny")
        assert ledger.events[0].ttft_us > 200_000, "200 steps of more than a millisecond"
        ledger.reserved.clear(), ledger.settled.clear(), ledger.events.clear()
        w.router.plan = lambda _: Plan([[]] * 200, EVICTED)
        assert (await http.post(CHAT, json=body)).status_code == 200
        ledger.check("tiny")
        assert ledger.events[0].ttft_us == 0, "no token ever came"
        assert not ledger.settled[0][1]["was_served"], "a sign of life is no answer"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves(
    world, ledger, eventually, is_stream: bool, n: int, has_begun: bool
) -> None:
    async with world() as w:
        w.router.plan = lambda _: Plan([[40] if has_begun else []] * 100_000, None)
        body = {"model": "tiny", "messages": HELLO, "n": n, "stream": is_stream}
        _, writer = await w.raw(body)
        await eventually(lambda: len(w.router.submits) == (n if has_begun else 1))
        [answers] = w.gateway.dispatcher._open
        await eventually(
            lambda: not has_begun or all(it.generation.emitted for it in answers._pursuits)
        )
        writer.close()
        await eventually(lambda: ledger.events)
        ledger.check("tiny")
        assert (ledger.events[0].outcome, ledger.events[0].status) == ("client_closed", 499)
        assert ledger.settled[0][1]["was_served"], "leaving does not give a request back"
        await eventually(lambda: len(w.router.cancelled) == len(w.router.submits))
        assert w.gateway.dispatcher.open == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_of_ours_before_anything_was_asked(
    world, ledger, monkeypatch, is_stream: bool
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Dialect, "parser", fails)
    async with world() as w, w.http() as http:
        body = {"model": "tiny", "messages": HELLO, "stream": is_stream}
        response = await http.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
        ledger.check("tiny")
        assert (ledger.events[0].outcome, ledger.events[0].output_tokens) == ("internal", 0)
        assert not ledger.settled[0][1]["was_served"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_model_that_stands_in(world, ledger, eventually, is_stream: bool) -> None:
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = lambda s: (
            Plan([], FULL) if len(w.router.submits) == 1 else w.default_plan(s)
        )
        body = {"model": "one/own", "messages": HELLO, "stream": is_stream}
        response = await http.post(CHAT, json=body)
        assert response.headers["x-sluice-model"] == "tiny"
        ledger.check("one/own", "tiny")
        assert [used["was_served"] for _, used in ledger.settled] == [False, True]
        assert (ledger.events[0].model, ledger.events[0].status) == ("tiny", 200)
        assert ledger.events[0].requested_model == "one/own"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (wire.OUTCOME_KIND_REJECTED, "context_length_exceeded"),
        (wire.OUTCOME_KIND_FAILED, "engine_refused"),  # an engine without grammars
    ],
)
async def test_a_model_that_stands_in_and_refuses_leaves_the_first_refusal(
    world, ledger, eventually, is_stream: bool, kind: wire.OutcomeKind, code: str
) -> None:
    own = wire.Outcome(kind=kind, code=code, message="x")
    first = wire.Outcome(
        kind=wire.OUTCOME_KIND_REJECTED, code="queue_full", message="full", retry_after_ms=7000
    )
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = lambda _: Plan([], first if len(w.router.submits) == 1 else own)
        body = {"model": "one/own", "messages": HELLO, "stream": is_stream}
        response = await http.post(CHAT, json=body)
        assert len(w.router.submits) == 2
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert response.headers["retry-after"] == "7"
        ledger.check("one/own", "tiny")
        assert not any(used["was_served"] for _, used in ledger.settled)
        assert (ledger.events[0].outcome, ledger.events[0].status) == ("queue_full", 503)


@pytest.mark.parametrize(
    ("own", "status", "is_charged"),
    [
        (FAILED, 502, False),
        (wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="internal", message="no"), 500, False),
        (
            wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="invalid_request", message="x"),
            400,
            True,
        ),
    ],
    ids=["engine_failed", "internal", "invalid_request"],
)
async def test_a_failure_of_a_model_that_stands_in_is_told_and_a_bad_grammar_charged(
    world, ledger, eventually, own: wire.Outcome, status: int, is_charged: bool
) -> None:
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = lambda _: Plan([], FULL if len(w.router.submits) == 1 else own)
        body = {"model": "one/own", "messages": HELLO, "regex": "(((("}
        response = await http.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (status, own.code)
        ledger.check("one/own", "tiny")
        assert [used["was_served"] for _, used in ledger.settled] == [False, is_charged]
        assert (ledger.events[0].outcome, ledger.events[0].status) == (own.code, status)


async def test_the_state_of_a_replaced_model_is_freed(
    world, ledger, eventually, monkeypatch
) -> None:
    streams: list[weakref.ref[StreamedGeneration]] = []
    held: list[list[bool]] = []

    class Noted(StreamedGeneration):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            streams.append(weakref.ref(self))

    def plan(_: wire.Submit) -> Plan:
        held.append([it() is not None for it in streams])
        return Plan([], FULL)

    monkeypatch.setattr(ChatTask, "streamed", Noted)
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = plan
        gc.disable()  # what needs it keeps prompts until it comes
        try:
            body = {"model": "one/own", "messages": HELLO, "stream": True}
            assert (await http.post(CHAT, json=body)).status_code == 503
            await eventually(lambda: ledger.events)
            assert held == [[True], [False, True]]
            assert [it() for it in streams] == [None, None]
        finally:
            gc.enable()


async def test_tokens_generated_before_a_fallback_are_charged(world, ledger, eventually) -> None:
    late = wire.Outcome(kind=wire.OUTCOME_KIND_EVICTED, code="deadline_exceeded")
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")

        def plan(submit: wire.Submit) -> Plan:
            if len(w.router.submits) == 1:
                return Plan([[40]] * 10_000, None)
            return Plan([], late) if len(w.router.submits) == 2 else w.default_plan(submit)

        w.router.plan = plan
        body = {"model": "one/own", "messages": HELLO, "n": 2}
        response = await http.post(CHAT, json=body)
        assert response.json()["model"] == "tiny"
        ledger.check("one/own", "tiny")
        first, second = (used for _, used in ledger.settled)
        assert first["output_tokens"] > 0
        usage = response.json()["usage"]
        assert second["output_tokens"] == usage["completion_tokens"]
        [event] = ledger.events
        assert (event.model, event.output_tokens) == ("tiny", usage["completion_tokens"])
        lost = (event.lost_model, event.lost_prompt_tokens, event.lost_output_tokens)
        assert lost == ("one/own", first["prompt_tokens"], first["output_tokens"])


async def test_limits_that_leave_no_room_for_another_model(world, ledger, eventually) -> None:
    async with world() as w, w.http() as http:
        objects = w.feed.objects
        free = next(it for it in objects.tiers if it.id == "free")
        free.model_limits["tiny"].rpm = 1
        await stand_in(w, eventually, "one/own", "tiny")
        await http.post(CHAT, json={"model": "tiny", "messages": HELLO})
        w.router.plan = lambda _: Plan([], FULL)
        response = await http.post(CHAT, json={"model": "one/own", "messages": HELLO})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert [model for _, model in ledger.reserved] == ["tiny", "one/own"]
        assert ledger.is_balanced
        assert len(ledger.settled) == len(ledger.events) == 2
        assert ledger.events[1].model == "one/own"
        limited, free = ledger.events
        assert (limited.limits, free.limits) == ("model rpm=1", "")
        assert limited.reserved_tokens > limited.prompt_tokens
        assert not limited.is_limited_locally


async def test_a_fallback_model_gets_the_rest_of_the_deadline(world, ledger, eventually) -> None:
    async with world() as w, w.http() as http:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = lambda s: (
            Plan([[]] * 600, FULL) if len(w.router.submits) == 1 else w.default_plan(s)
        )
        body = {"model": "one/own", "messages": HELLO, "deadline_ms": 60_000}
        assert (await http.post(CHAT, json=body)).status_code == 200
        first, second = (submit.deadline_ms for submit in w.router.submits)
        assert first == 60_000
        assert 0 < second <= 59_400, "600 steps of more than a millisecond are gone"
        w.router.submits.clear()
        late = {**body, "deadline_ms": 1000}
        response = await http.post(CHAT, json=late)
        assert response.json()["error"]["code"] == "queue_full"
        assert len(w.router.submits) == 1
        assert len(ledger.events) == 2


@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_that_leave_at_any_moment(world, ledger, eventually, seed: int) -> None:
    draw = random.Random(seed)
    lost = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost", message="gone")

    def plan(submit: wire.Submit) -> Plan:
        kind = draw.random()
        if kind < 0.2:
            return Plan([], FULL)
        if kind < 0.4 and not submit.resumed_tokens:
            return Plan([[40]] * 5, lost)
        return Plan([[], [40]] * draw.randrange(1, 20))

    async def leave(w, after_s: float, body: dict[str, object]) -> None:
        _, writer = await w.raw(body)
        await asyncio.sleep(after_s)
        writer.close()

    async with world(keep_alive_s=0.02) as w:
        await stand_in(w, eventually, "one/own", "tiny")
        w.router.plan = plan
        async with asyncio.TaskGroup() as tasks:
            for _ in range(80):
                body = {
                    "model": draw.choice(("tiny", "one/own")),
                    "messages": HELLO,
                    "n": draw.choice((1, 1, 2, 3)),
                    "stream": draw.random() < 0.6,
                    "max_tokens": 200,
                }
                tasks.create_task(leave(w, draw.random() * 0.08, body))
        await eventually(lambda: not w.gateway.http.server.open_connections)
        await eventually(lambda: w.gateway.dispatcher.open == 0 and ledger.is_balanced)
        await eventually(lambda: w.gateway.links.in_flight == 0)
        assert len({event.event_id for event in ledger.events}) == len(ledger.events)
        settled = [id(it) for it, _ in ledger.settled]
        assert len(set(settled)) == len(settled), "none twice"
        stood_in = len(ledger.reserved) - len(ledger.events)
        assert f"gateway_fallbacks_total {float(stood_in)}".encode() in w.gateway.metrics.page()


async def test_two_callers_may_use_the_same_request_id(world, ledger) -> None:
    async with world() as w, w.http() as one, w.http("sk-two") as two:
        tenants = {"one": "of the first", "two": "of the second"}
        w.router.plan = lambda s: Plan([[t] for t in w.ids(tenants[s.tenant_id])])
        body = {"model": "tiny", "messages": HELLO, "n": 2}
        answers = await asyncio.gather(
            one.post(CHAT, json=body, headers={"x-request-id": "same"}),
            two.post(CHAT, json=body, headers={"x-request-id": "same"}),
            two.post(CHAT, json=body, headers={"x-request-id": "same-1"}),
        )
        texts = [[it["message"]["content"] for it in a.json()["choices"]] for a in answers]
        assert texts == [["of the first"] * 2, ["of the second"] * 2, ["of the second"] * 2]
        assert len({answer.json()["id"] for answer in answers}) == 3
        assert len({event.event_id for event in ledger.events}) == 3
