"""The single event of a request, made of what its router was given at the begin."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gateway.dispatch.exchange import Exchange, Tally
from sluice.tracecontext import Upstream
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

TALLY = Tally(prompt_tokens=12, cached_tokens=0, output_tokens=9, session_hash=5)


def exchange() -> Exchange:
    one = SimpleNamespace(id="one")
    principal: Any = SimpleNamespace(tenant=one, key=one, tier=one)
    return Exchange(
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
    assert told.event(TALLY, "g", 2.0) == plain.event(TALLY, "g", 2.0)
    assert len(plain.event(TALLY, "g", 2.0).tracestate) == 502
    events = [RequestEvent.FromString(part.closing) for part in parts]
    assert not any(it.tracestate or it.parent_span_id for it in events)  # they are no spans
    assert [(it.part, it.prompt_tokens, it.total_us) for it in events] == [(0, 12, 0), (1, 0, 0)]


def test_the_event_is_of_the_model_that_answered() -> None:
    it = exchange()
    it.prepare_closings(generations(), 2, "g")
    it.model = model("other")
    assert it.event(TALLY, "g", 2.0).model == "other"


def test_the_event_says_how_long_an_adapter_was_waited_for() -> None:
    placed = wire.Placed(replica_id="r", engine_queue_us=9, load_us=8)
    event = exchange().event(replace(TALLY, placed=placed), "g", 2.0)
    assert (event.engine_queue_us, event.load_us) == (9, 8)


def test_events_are_not_shared() -> None:
    it = exchange()
    it.prepare_closings(generations(), 2, "g")
    first = it.event(TALLY, "g", 2.0)
    it.outcome = "stop"
    it.event(TALLY, "g", 2.0)
    assert first.outcome == ""


def test_what_begins_is_described_once(monkeypatch: Any) -> None:
    made: list[int] = []
    begin = Exchange._begun_event
    monkeypatch.setattr(
        Exchange, "_begun_event", lambda self, name: made.append(1) or begin(self, name)
    )
    it = exchange()
    it.prepare_closings(generations(), 2, "g")
    it.event(TALLY, "g", 2.0)
    assert made == [1]
