"""The single event of a request, made of what its router was given at the begin."""

import hashlib
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import directory
from gateway.directory import Directory, Principal
from gateway.dispatch.tally import Tally
from gateway.endpoints import event_head
from gateway.endpoints.exchange import AnswerScore, HttpExchange, Lost
from gateway.limits.limiter import Reservation
from gateway.rollouts.decision import ReleaseDecision
from gateway.rollouts.flaws import Flaws
from sluice.tracecontext import Upstream
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import ARM_CANARY, ARM_CONTROL, RequestEvent

TALLY = Tally(prompt_tokens=12, cached_tokens=0, output_tokens=9, session_hash=5)


def exchange() -> HttpExchange:
    one = SimpleNamespace(id="one")
    principal: Any = SimpleNamespace(tenant=one, key=one, tier=one, event_heads={})
    return HttpExchange(
        uid="u",
        request_id="r",
        trace_id="t",
        endpoint="/v1/completions",
        received_at_s=1.0,
        received_at_unix_ms=5,
        principal=principal,
        model=model("m"),
        requested_model="m",
        reservation=None,
        is_stream=False,
        choices=2,
    )


def model(name: str) -> Any:
    digests = {"base_digest": "b", "adapter_digest": "", "pool_id": "p"}
    return SimpleNamespace(id=name, release="1", **digests)


def parsed(it: HttpExchange, tally: Tally = TALLY) -> RequestEvent:
    return RequestEvent.FromString(it.event(tally, "g", 2.0))


def generations() -> list[Any]:
    spec = SimpleNamespace(session_hash=5, prompt=[1] * 12)
    return [SimpleNamespace(spec=spec, closing=b"") for _ in range(2)]


def test_the_event_at_the_end_is_the_same_with_and_without_closings() -> None:
    plain, told = exchange(), exchange()
    for it in (plain, told):
        it.upstream = Upstream("t", "b" * 16, is_sampled=True, state="a=" + "x" * 500)
    parts = generations()
    told.prepare_closings(parts, 2, "g")
    for it in (plain, told):
        it.outcome, it.status = "stop", 200
    assert parsed(told) == parsed(plain)
    assert len(parsed(plain).tracestate) == 502
    events = [RequestEvent.FromString(part.closing) for part in parts]
    assert not any(it.tracestate or it.parent_span_id for it in events)  # they are no spans
    assert [(it.part, it.prompt_tokens, it.total_us) for it in events] == [(0, 12, 0), (1, 0, 0)]


def test_the_event_is_of_the_model_that_answered() -> None:
    it = exchange()
    it.prepare_closings(generations(), 2, "g")
    it.stand_in(model("other"), ReleaseDecision(is_pinned=True), (), Lost("m", 7, 8))
    event = parsed(it)
    assert (event.model, event.is_pinned) == ("other", True)
    assert (event.lost_model, event.lost_prompt_tokens, event.lost_output_tokens) == ("m", 7, 8)


def test_the_event_says_how_long_an_adapter_was_waited_for() -> None:
    placed = wire.Placed(replica_id="r", engine_queue_us=9, load_us=8)
    event = parsed(exchange(), replace(TALLY, placed=placed))
    assert (event.engine_queue_us, event.load_us) == (9, 8)


def test_a_beginning_is_described_once(monkeypatch: Any) -> None:
    made: list[int] = []
    begin = HttpExchange._begin
    monkeypatch.setattr(
        HttpExchange, "_begin", lambda self, name: made.append(1) or begin(self, name)
    )
    it = exchange()
    it.prepare_closings(generations(), 2, "g")
    it.event(TALLY, "g", 2.0)
    assert made == [1]


def test_every_field_arrives() -> None:
    it = exchange()
    scopes: Any = [SimpleNamespace(told="account rpm=6"), SimpleNamespace(told="key rpm=3")]
    forecast: Any = None
    it.reservation = Reservation(scopes, [0], 40, forecast, 1, None, True)
    it.decision, it.lost = ReleaseDecision(rollout_id="o", arm=ARM_CANARY), Lost("other", 7, 8)
    it.is_copy = it.is_stream = True
    it.flaws = Flaws(is_refusal=True, is_empty=True, is_repetitive=True)
    it.upstream = Upstream("t", "b" * 16, is_sampled=True, state="a=b")
    it.first_sent_at_s, it.outcome, it.status = 1.5, "stop", 200
    placed = wire.Placed(replica_id="i", queue_us=1, engine_queue_us=9, load_us=8)
    went_to = {"submitted_at_s": 1.25, "cell_id": "c", "router_id": "x"}
    tally = replace(
        TALLY, **went_to, placed=placed, cached_tokens=4, prefill_us=3, itl_max_s=0.1, resumes=2
    )
    spec: Any = SimpleNamespace(dropped_turns=3)
    it.specs = [spec, spec]
    parts = generations()
    it.prepare_closings(parts, 2, "g")
    ids = {"event_id": "evt_u", "request_id": "r", "trace_id": "t", "received_at_unix_ms": 5}
    whose = dict.fromkeys(("tenant_id", "key_id", "tier_id"), "one")
    models = {"model": "m", "requested_model": "m", "release": "1", "base_digest": "b"}
    places = {"pool_id": "p", "gateway_id": "g", "endpoint": "/v1/completions", "is_stream": True}
    rollout: Any = {"rollout_id": "o", "arm": ARM_CANARY, "is_copy": True}
    lost = {"lost_model": "other", "lost_prompt_tokens": 7, "lost_output_tokens": 8}
    counts = {"schema_version": 1, "session_hash": 5, "prompt_tokens": 12, "choices": 2}
    begun = {**ids, **whose, **models, **places, **rollout, **lost, **counts}
    assert RequestEvent.FromString(parts[0].closing) == RequestEvent(**begun)
    trace = {"parent_span_id": "b" * 16, "is_sampled": True, "tracestate": "a=b"}
    went = {"cell_id": "c", "router_id": "x", "replica_id": "i", "resumes": 2}
    went |= dict.fromkeys(("is_refusal", "is_empty", "is_repetitive"), True)
    times = {"gateway_us": 250_000, "ttft_us": 500_000, "total_us": 1_000_000, "prefill_us": 3}
    waits = {"queue_us": 1, "engine_queue_us": 9, "load_us": 8, "itl_max_us": 100_000}
    came = {"outcome": "stop", "status": 200, "output_tokens": 9, "cached_tokens": 4}
    limits: Any = {"limits": "account rpm=6; key rpm=3", "reserved_tokens": 40}
    limits["dropped_turns"] = 3
    ended = {**trace, **went, **times, **waits, **came, **limits, "is_limited_locally": True}
    assert parsed(it, tally) == RequestEvent(**begun, **ended)


def test_a_score_belongs_to_no_rollout_but_names_the_rollout_of_its_answer() -> None:
    it = exchange()
    it.scored, it.score = (
        ReleaseDecision(rollout_id="o", arm=ARM_CONTROL),
        AnswerScore(-2.0, -0.5, 0.25),
    )
    parts = generations()
    it.prepare_closings(parts, 1, "g")
    for event in (parsed(it), RequestEvent.FromString(parts[0].closing)):
        assert (event.rollout_id, event.scored_rollout_id) == ("", "o")
        assert (event.arm, event.is_copy) == (ARM_CONTROL, True)
    event = parsed(it)
    assert (event.base_logprob, event.answer_logprob, event.answer_entropy) == (-2.0, -0.5, 0.25)


def test_shared_parts_of_events_are_made_once_per_caller_and_model() -> None:
    first, again, changed = exchange(), exchange(), exchange()
    again.principal = changed.principal = first.principal
    again.model = first.model
    changed.model = model("m")
    changed.model.release = "2"  # of the same name
    kept = first.principal.event_heads
    for it in (first, again):
        it.prepare_closings(generations(), 2, "g")
        assert (parsed(it).event_id, parsed(it).release) == ("evt_u", "1")
    assert len(kept) == 1
    assert parsed(changed).release == "2"
    again.is_stream = True
    assert parsed(again).is_stream
    assert len(kept) == 3


def test_few_shared_parts_are_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(event_head, "_HEADS_MAX", 3)
    it = exchange()
    for number in range(10):
        it.requested_model = str(number)
        assert parsed(it).requested_model == str(number)
        assert 1 <= len(it.principal.event_heads) <= 3


class Watched(Principal):
    """A caller whose end can be noticed."""


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_no_replaced_caller_is_kept(monkeypatch: Any, is_snapshot: bool) -> None:
    """A message that is kept keeps all that the control plane sent with it."""
    monkeypatch.setattr(directory, "Principal", Watched)
    objects = control.Objects(
        tenants=[control.Tenant(id="a")],
        keys=[control.ApiKey(id="k", tenant_id="a", secret_sha256=hashlib.sha256(b"one").digest())],
        models=[control.Model(id="m", release="1", owner_tenant_id="a")],
    )
    state = ControlState()
    known = Directory(state)

    def update(version: int, *, is_snapshot: bool) -> None:
        told = control.WatchResponse(version=version, is_snapshot=is_snapshot, upserts=objects)
        assert state.apply(told)
        known.update(told)

    update(1, is_snapshot=True)
    ended, open_ = exchange(), exchange()
    for it in (ended, open_):
        it.principal = known.authenticate("one", 0)
        it.model = known.model(it.principal, "m")
        it.prepare_closings(generations(), 2, "g")
    assert parsed(ended).key_id == "k"
    caller = weakref.ref(ended.principal)
    del ended, it
    update(2, is_snapshot=is_snapshot)
    assert known.authenticate("one", 0) is not open_.principal
    assert caller() is open_.principal
    assert (parsed(open_).key_id, parsed(open_).release) == ("k", "1")
    del open_
    assert caller() is None


@pytest.mark.parametrize(
    ("outcome", "is_aborted"),
    [("stop", False), ("content_filter", False), ("client_closed", True), ("slow_reader", True)],
)
def test_an_exchange_is_aborted_if_its_answer_is_not_whole(outcome: str, is_aborted: bool) -> None:
    it = exchange()
    it.outcome = outcome
    assert it.is_aborted is is_aborted
