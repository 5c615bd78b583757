"""A model in rollout: who gets which release, what stays with what began, and copies for nobody."""

import asyncio

import pytest

from gateway.endpoints.scores import ScoreSampler
from gateway.limits.limiter import Limiter
from sluice.events import EventProducer
from sluice.split import SHARE_MAX, ReleaseSplit
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1 import telemetry_pb2 as telemetry
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

WAIT_S = 60
CANARY_ADAPTER = "canary"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)
FAILED = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="engine_failed", message="no")
LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost", message="gone")
SORRY = "I'm sorry, but I can't help with that."


@pytest.fixture
def told(monkeypatch) -> list[telemetry.RequestEvent]:
    """What gateways tell, scores included."""
    told: list[telemetry.RequestEvent] = []
    parse = telemetry.RequestEvent.FromString
    monkeypatch.setattr(EventProducer, "emit", lambda _, payload: told.append(parse(payload)))
    return told


@pytest.fixture
def events(monkeypatch) -> list[telemetry.RequestEvent]:
    """What gateways tell of requests; none of their answers is scored."""
    told: list[telemetry.RequestEvent] = []
    parse = telemetry.RequestEvent.FromString
    monkeypatch.setattr(EventProducer, "emit", lambda _, payload: told.append(parse(payload)))
    monkeypatch.setattr(ScoreSampler, "offer", lambda *_: None)
    return told


class Rollout:
    """Of the world's model `tiny`, from release 1 to release 2."""

    def __init__(self, world, eventually) -> None:
        self.world = world
        self.eventually = eventually

    async def split(self, share: int, *, mirrored: int = 0, pins: dict[str, str] | None = None):
        """Change the split, and wait until the gateway has confirmed that it knows."""
        feed, digest = self.world.feed, self.world.digest
        objects = control.Objects()
        objects.CopyFrom(feed.objects)
        del objects.releases[:], objects.splits[:]
        for name, adapter in (("1", ""), ("2", CANARY_ADAPTER)):
            objects.releases.add(
                id=f"tiny@{name}",
                model_id="tiny",
                base_digest=digest,
                adapter_digest=adapter,
                pool_id="pool",
            )
        names = {"id": "tiny", "control": "1", "canary": "2", "salt": "s", "rollout_id": "r"}
        objects.splits.add(share=share, mirrored=mirrored, **names)
        for tenant in objects.tenants:
            if tenant.id == "two":
                tenant.pins.update(pins or {})
        feed.replace(objects)
        await self.until(lambda: self.confirmed.version == feed.version)

    async def until(self, check) -> None:
        await self.eventually(check, timeout_s=WAIT_S)

    @property
    def confirmed(self) -> control.ConfirmRequest:
        """What the gateway has confirmed last."""
        told = self.world.feed.confirmed
        return told[-1] if told else control.ConfirmRequest()

    def submits(self, *, of_canary: bool) -> list[wire.Submit]:
        adapter = CANARY_ADAPTER if of_canary else ""
        return [it for it in self.world.router.submits if it.adapter_digest == adapter]


async def release_of(http, session: str, model: str = "tiny") -> str | None:
    """Ask once; return the release that the answer names."""
    body = {"model": model, "prompt": "hello", "max_tokens": 2, "session_id": session}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.headers.get("x-sluice-release")


async def test_sessions_are_split_and_stay_while_the_share_grows(world, events, eventually) -> None:
    async with world() as w, w.http() as http, w.http("sk-two") as pinned:
        rollout = Rollout(w, eventually)
        assert await release_of(http, "before") is None
        names = [f"session {number}" for number in range(80)]
        before: set[str] = set()
        for share in (2500, 6000):
            await rollout.split(share, pins={"tiny": "2"})
            told = await asyncio.gather(*(release_of(http, name) for name in names))
            split = ReleaseSplit("tiny", "1", "2", share, "s")
            assert told == [split.choose("one", name, "").release for name in names]
            in_canary = {name for name, release in zip(names, told, strict=True) if release == "2"}
            assert before < in_canary < set(names)
            before = in_canary
        assert len(rollout.submits(of_canary=True)) == told.count("2") + sum(
            ReleaseSplit("tiny", "1", "2", 2500, "s").choose("one", it, "").is_canary
            for it in names
        )
        assert await release_of(pinned, "any") == "2"
        assert events[-1].is_pinned
        assert events[-1].rollout_id == ""
        assert await release_of(http, names[0], "tiny@1") is None
        listed = {it["id"]: it["release"] for it in (await http.get("/v1/models")).json()["data"]}
        assert listed["tiny"] == "1", "clients see the release that goes on"
        of_rollout = [it for it in events if it.rollout_id]
        assert len(of_rollout) == 2 * len(names)
        for event in of_rollout:
            is_canary = event.arm == telemetry.ARM_CANARY
            assert (event.release, event.rollout_id) == ("2" if is_canary else "1", "r")
            assert (event.choices, event.is_copy, event.is_refusal) == (1, False, False)
        page = w.gateway.metrics.page().decode()
        for arm, count in (("canary", sum(it.release == "2" for it in of_rollout)), ("pinned", 1)):
            assert f'gateway_rollout_requests_total{{arm="{arm}"}} {float(count)}' in page


def scored(submit: wire.Submit) -> Plan:
    """How an engine answers that finds answers of `canary` less likely without it."""
    score = engine.Score(logprob=-0.5 if submit.adapter_digest else -2.0, entropy=0.25)
    return Plan([[7]], wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH, score=score))


@pytest.mark.parametrize("is_shadow", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_of_canary_is_scored_by_it_and_by_its_base(
    world, told, eventually, is_stream, is_shadow
) -> None:
    """Behind all other work, at nobody's cost, as the end of the prompt; one at a time."""
    async with world() as w, w.http() as http:
        rollout = Rollout(w, eventually)
        await rollout.split(0 if is_shadow else SHARE_MAX, mirrored=SHARE_MAX if is_shadow else 0)
        noted: set[str] = set()

        def plan(submit: wire.Submit) -> Plan:
            noted.update(w.gateway.open_requests._received_at)
            return scored(submit) if submit.scored_tokens else w.default_plan(submit)

        w.router.plan = plan
        body = {"model": "tiny", "messages": HELLO, "stream": is_stream, "session_id": "a"}
        body |= {"stop": ["zzz"], "temperature": 0.5, "logprobs": True}
        for _ in range(3):
            assert (await http.post(CHAT, json=body)).status_code == 200
        await rollout.until(lambda: any(it.scored_rollout_id for it in told))
        asked = [it for it in w.router.submits if it.scored_tokens]
        assert [it.adapter_digest for it in asked] == [CANARY_ADAPTER, ""]
        answered = next(it for it in rollout.submits(of_canary=True) if not it.scored_tokens)
        answer = [it for step in w.default_plan(answered).steps for it in step]  # with its end
        for submit in asked:
            assert list(submit.prompt) == [*answered.prompt, *answer]
            assert submit.scored_tokens == len(answer)
            assert (submit.tier_priority, submit.tier_reserved_permille) == (0, 0)
            assert (submit.is_preemptible, submit.output_tokens_max) == (True, 1)
            assert len({it.cache_root for it in asked}) == 2
        [event] = [it for it in told if it.scored_rollout_id]
        assert (event.scored_rollout_id, event.arm) == ("r", telemetry.ARM_CANARY)
        assert (event.rollout_id, event.is_copy, event.release) == ("", True, "2")
        assert (event.base_logprob, event.answer_logprob) == (-2.0, -0.5)
        assert (event.answer_entropy, event.status, event.output_tokens) == (0.25, 200, 2)
        assert event.session_hash == next(it.session_hash for it in told if it.arm)
        assert not [uid for uid in noted if uid.endswith("-score")], "no window waits for scores"
        assert 'gateway_scores_total{fate="made"} 1.0' in w.gateway.metrics.page().decode()


async def test_engines_that_score_nothing_are_not_asked_all_the_time(
    world, told, eventually
) -> None:
    """As older ones and those of TensorRT-LLM: clients see nothing of it, and no gate counts it."""
    async with world() as w, w.http() as http:
        rollout = Rollout(w, eventually)
        await rollout.split(SHARE_MAX)
        body = {"model": "tiny", "messages": HELLO}
        assert (await http.post(CHAT, json=body)).status_code == 200
        await rollout.until(lambda: any(it.scored_rollout_id for it in told))
        [event] = [it for it in told if it.scored_rollout_id]
        assert (event.outcome, event.status) == ("unsupported_parameter", 400)
        await rollout.until(lambda: w.gateway.spare.open == 0)
        assert (await http.post(CHAT, json=body)).status_code == 200
        assert len([it for it in w.router.submits if it.scored_tokens]) == 2
        assert 'gateway_scores_total{fate="failed"} 1.0' in w.gateway.metrics.page().decode()


async def test_running_requests_end_on_their_release_after_a_rollback(
    world, events, eventually
) -> None:
    """Also when its replica is lost. And the control plane hears which state counts, and since when
    something is open.
    """
    async with world() as w, w.http() as http:
        ids = w.ids(w.text)
        rollout, open_plan = Rollout(w, eventually), Plan([ids[:1]], None)
        await rollout.split(SHARE_MAX)
        w.router.plan = lambda _: open_plan
        body = {"model": "tiny", "messages": HELLO, "stream": True, "session_id": "a"}
        async with http.stream("POST", CHAT, json=body) as response:
            assert response.headers["x-sluice-release"] == "2"
            lines = response.aiter_lines()
            await anext(lines)
            w.router.plan = w.default_plan
            w.feed.is_deaf = True
            w.feed.replace(w.feed.objects)
            await rollout.until(lambda: w.feed.refused > 1)
            w.feed.is_deaf = False
            await rollout.until(lambda: rollout.confirmed.version == w.feed.version)
            await rollout.split(0)
            assert rollout.confirmed.gateway_id == "gateway-test"
            began_at_ms = rollout.confirmed.oldest_open_unix_ms
            assert began_at_ms > 0
            assert await release_of(http, "a") == "1"
            w.router.plan = lambda s: Plan([[it] for it in ids[s.resumed_tokens :]], STOP)
            open_plan.outcome = LOST
            async with asyncio.timeout(WAIT_S):
                text = "\n".join([line async for line in lines])
        assert text.rstrip().endswith("data: [DONE]")
        assert [it.resumed_tokens for it in rollout.submits(of_canary=True)] == [0, 1]
        await rollout.until(lambda: len(events) == 2)
        control_event, canary_event = events
        assert (control_event.arm, control_event.release) == (telemetry.ARM_CONTROL, "1")
        assert (canary_event.arm, canary_event.release) == (telemetry.ARM_CANARY, "2")
        assert canary_event.received_at_unix_ms == began_at_ms
        assert canary_event.resumes == 1
        await rollout.split(0)
        assert rollout.confirmed.oldest_open_unix_ms == 0, "nothing is open"


async def test_hanging_copies_do_not_disturb_callers(
    world, events, eventually, monkeypatch
) -> None:
    reserved, reserve = [], Limiter.reserve

    async def reserving(self: Limiter, *args: object, **named: object) -> object:
        reserved.append(args)
        return await reserve(self, *args, **named)

    monkeypatch.setattr(Limiter, "reserve", reserving)
    async with world(copies_max=3) as w, w.http() as http:
        rollout = Rollout(w, eventually)
        await rollout.split(0, mirrored=SHARE_MAX)

        async def ask(canary: Plan, *, is_stream: bool) -> None:
            def plan(submit: wire.Submit) -> Plan:
                return canary if submit.adapter_digest else w.default_plan(submit)

            w.router.plan = plan
            body = {"model": "tiny", "messages": HELLO, "stream": is_stream}
            response = await http.post(CHAT, json=body)
            assert response.status_code == 200
            assert response.headers["x-sluice-release"] == "1"
            if not is_stream:
                assert response.json()["choices"][0]["message"]["content"] == w.text

        for number in range(5):
            await ask(Plan([], None), is_stream=bool(number % 2))
        await rollout.until(lambda: len(rollout.submits(of_canary=True)) == 3)
        page = w.gateway.metrics.page().decode()
        assert 'gateway_copies_total{fate="dropped"} 2.0' in page
        assert "gateway_open_copies 3.0" in page
        first = rollout.submits(of_canary=False)[0]
        for copy in rollout.submits(of_canary=True):
            assert (copy.tier_priority, copy.tier_reserved_permille) == (0, 0)
            assert copy.is_preemptible
            assert copy.request_id.endswith("-copy")
            assert list(copy.prompt) == list(first.prompt)
        assert first.tier_priority > 0
        assert [it.is_copy for it in events] == [False] * 5
        w.gateway.spare.stop()
        await rollout.until(lambda: w.gateway.spare.open == 0)
        await rollout.until(lambda: len(w.router.cancelled) == 3)
        assert [it.outcome for it in events if it.is_copy] == ["client_closed"] * 3
        assert len(reserved) == 5, "nobody pays for a copy"


async def test_copies_compare_canary_on_the_same_requests(world, events, eventually) -> None:
    """It fails first, then it declines, says nothing, repeats itself; clients see control alone."""
    async with world() as w, w.http() as http:
        rollout = Rollout(w, eventually)
        await rollout.split(0, mirrored=SHARE_MAX)
        sorry, again = ([[token] for token in tokens] for tokens in (w.ids(SORRY), w.ids("a") * 9))
        plans = (Plan([], FAILED), Plan(sorry), Plan([]), Plan(again))
        for count, canary in zip((2, 4, 6, 8), plans, strict=True):
            w.router.plan = lambda s, c=canary: c if s.adapter_digest else w.default_plan(s)
            body = {"model": "tiny", "messages": HELLO, "stream": True}
            assert (await http.post(CHAT, json=body)).status_code == 200
            await rollout.until(lambda n=count: len(events) == n)
        copies = [it for it in events if it.is_copy]
        told = [(it.outcome, it.is_refusal, it.is_empty, it.is_repetitive) for it in copies]
        assert told == [
            ("engine_failed", False, False, False),
            ("length", True, False, False),
            ("length", False, True, False),
            ("length", False, False, True),
        ]
        for event in copies:
            assert (event.arm, event.rollout_id) == (telemetry.ARM_CANARY, "r")
        assert len({it.event_id for it in events}) == 8
        assert [it.outcome for it in events if not it.is_copy] == ["stop"] * 4
        assert len(rollout.submits(of_canary=True)) == 4


@pytest.mark.parametrize("code", ["adapter_invalid", "adapter_not_found"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_control_answers_requests_that_canary_cannot_load(
    world, events, eventually, code, is_stream
) -> None:
    """The client sees no fault, and the rollout counts it as canary's."""
    refused = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code=code, message="rank 32")
    async with world() as w, w.http() as http:
        rollout = Rollout(w, eventually)
        await rollout.split(SHARE_MAX)
        w.router.plan = lambda s: Plan([], refused) if s.adapter_digest else w.default_plan(s)
        body = {"model": "tiny", "messages": HELLO, "stream": is_stream}
        response = await http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        assert "x-sluice-release" not in response.headers
        if not is_stream:
            assert response.json()["choices"][0]["message"]["content"] == w.text
        await rollout.until(lambda: len(events) == 2)
        fault, answer = events
        assert (fault.is_copy, fault.arm, fault.outcome) == (True, telemetry.ARM_CANARY, code)
        assert (fault.rollout_id, fault.release, fault.output_tokens) == ("r", "2", 0)
        assert (answer.is_copy, answer.rollout_id, answer.outcome) == (False, "", "stop")
        assert answer.release == "1"
        assert len({it.event_id for it in events}) == 2
        page = w.gateway.metrics.page().decode()
        assert 'gateway_rollout_requests_total{arm="unloaded"} 1.0' in page
        named = await http.post(CHAT, json={"model": "tiny@2", "messages": HELLO})
        assert named.json()["error"]["code"] == code, (
            "a request that names the release gets the error"
        )
