"""What a lost gateway leaves open is closed once, with what engines made."""

from hypothesis import given
from hypothesis import strategies as st

from router.closing import (
    KEPT_BYTES_MAX,
    KEPT_S,
    OUTCOME,
    SCHEMA_VERSION,
    Accounts,
    Closings,
    closed,
)
from router.core.types.account import ServiceAccount, TierTotals
from router.core.types.batch import GatewayBatch
from router.core.types.request import ConnectedGateway, Dispatch, Request
from router.counting import HOUR_MS, OTHER, TokenCounts
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

FINISH = wire.OUTCOME_KIND_LENGTH


def world() -> tuple[Accounts, Closings, ConnectedGateway]:
    counts = TokenCounts("router", 1)
    return Accounts(counts), Closings("router", counts), ConnectedGateway(1)


def submit(handle: int, *, resumed: int = 0, of: str = "", part: int = 0) -> wire.Submit:
    closing = RequestEvent(
        schema_version=1, event_id=of or f"e{handle}", prompt_tokens=0 if part else 7, part=part
    )
    return wire.Submit(handle=handle, closing=closing.SerializeToString(), resumed_tokens=resumed)


def ended(handle: int, tokens: int, kind: wire.OutcomeKind = FINISH) -> GatewayBatch:
    batch = GatewayBatch()
    batch.placed.append(wire.Placed(handle=handle, replica_id="r", cached_tokens=2))
    batch.outcomes.append(wire.Outcome(handle=handle, kind=kind, output_tokens=tokens))
    return batch


def running(handle: int, emitted: int, output: list[int] | None = None) -> Request:
    request = Request(handle=handle, cell_id="c", prompt_tokens=7)
    request.output = output
    request.dispatch = Dispatch(
        request, ServiceAccount(TierTotals()), "r", sequence=handle, now=0.0
    )
    request.dispatch.emitted = emitted
    return request


def told(closings: Closings) -> dict[str, RequestEvent]:
    events = [RequestEvent.FromString(data) for data in closings.take()]
    assert len({event.event_id for event in events}) == len(events)
    return {event.event_id: event for event in events}


def test_running_requests_are_closed_after_the_last_word_of_their_engine():
    accounts, closings, gateway = world()
    accounts.submitted([submit(1), submit(2, resumed=10), submit(3), submit(4)])
    request, resumed = running(1, 3), running(2, 5)
    preempted = running(3, 4, output=[0] * 9)  # five of them on another replica
    queued = Request(handle=4, cell_id="c", prompt_tokens=7)
    gateway.requests = {it.handle: it for it in (request, resumed, preempted, queued)}
    dispatches = [it.dispatch for it in (request, resumed, preempted)]
    closings.cut(accounts, gateway, now=1.0)
    closings.settle(lambda _: False, now=1.0)
    [waited] = told(closings).values()
    assert (waited.event_id, waited.replica_id, waited.output_tokens) == ("e4", "", 0)
    dispatches[0].emitted += 2  # before the engine heard of the cancel
    closings.settle(lambda dispatch: dispatch is dispatches[0], now=1.1)
    [event] = told(closings).values()
    assert (event.outcome, event.status, event.schema_version) == (OUTCOME, 500, SCHEMA_VERSION)
    assert (event.output_tokens, event.prompt_tokens, event.replica_id) == (5, 7, "r")
    assert event.router_id == "router"
    closings.settle(lambda _: False, now=100.0)  # they never said it
    assert {key: it.output_tokens for key, it in told(closings).items()} == {"e2": 15, "e3": 9}
    assert not closings.has_work


def test_recently_ended_requests_are_reported_and_old_ones_are_not():
    accounts, closings, gateway = world()
    accounts.submitted(submit(handle) for handle in range(1, 5))
    accounts.note_outcomes(ended(1, 11), now=0.0)
    accounts.note_outcomes(ended(2, 12), now=KEPT_S)
    accounts.note_outcomes(ended(3, 0, wire.OUTCOME_KIND_REJECTED), now=KEPT_S)
    gateway.batch = ended(4, 14)  # not handed out yet
    closings.cut(accounts, gateway, now=KEPT_S + 1.0)
    closings.settle(lambda _: True, now=KEPT_S + 1.0)
    events = told(closings)
    assert {key: it.output_tokens for key, it in events.items()} == {"e2": 12, "e4": 14}
    assert events["e2"].cached_tokens == 2


def test_closings_that_a_gateway_took_with_it_are_given_to_the_next():
    second, closings, _ = world()
    second.carried([submit(1).closing], now=5.0)
    closings.cut(second, ConnectedGateway(2), now=6.0)
    closings.settle(lambda _: True, now=6.0)
    assert set(told(closings)) == {"e1"}
    closings.cut(second, ConnectedGateway(2), now=5.1 + KEPT_S)
    closings.settle(lambda _: True, now=5.1 + KEPT_S)
    assert not closings.has_work


def test_closings_that_were_carried_long_ago_take_no_room():
    accounts, _, _ = world()
    for step in range(200):
        accounts.carried([submit(1).closing] * 501, now=step * 10.0)
    assert len(accounts._carried) <= 501 * (KEPT_S // 10 + 1)


def test_an_answer_that_has_ended_is_kept_while_another_of_its_request_runs():
    accounts, closings, gateway = world()
    accounts.submitted([submit(1, of="e"), submit(2, of="e", part=1), submit(3)])
    accounts.note_outcomes(ended(1, 40), now=0.0)
    for step in range(1, 10):  # others end meanwhile, and are forgotten
        accounts.submitted([submit(10 + step)])
        accounts.note_outcomes(ended(10 + step, 1), now=step * KEPT_S)
    gateway.requests = {2: running(2, 100)}
    closings.cut(accounts, gateway, now=9 * KEPT_S + 1)
    closings.settle(lambda _: True, now=9 * KEPT_S + 1)
    events = [RequestEvent.FromString(data) for data in closings.take()]
    parts = {it.part: it.output_tokens for it in events if it.event_id == "e"}
    assert parts == {0: 40, 1: 100}


def test_all_answers_of_a_request_are_kept_as_long_as_the_last_of_them():
    accounts, closings, gateway = world()
    accounts.submitted([submit(1, of="e"), submit(2, of="e", part=1)])
    accounts.note_outcomes(ended(1, 40), now=0.0)
    accounts.note_outcomes(ended(2, 50), now=2 * KEPT_S)
    closings.cut(accounts, gateway, now=3 * KEPT_S - 1)
    closings.settle(lambda _: True, now=3 * KEPT_S)
    assert sorted(RequestEvent.FromString(it).output_tokens for it in closings.take()) == [40, 50]


def test_kept_ended_answers_are_bounded():
    accounts, _, _ = world()
    large = RequestEvent(event_id="e", model="m" * 60_000).SerializeToString()
    for handle in range(2000):
        accounts.submitted([wire.Submit(handle=handle, closing=large)])
        accounts.note_outcomes(ended(handle, 1), now=0.0)
    assert sum(len(it.closing) for it in accounts.ended(0.0)) <= KEPT_BYTES_MAX


def test_cached_tokens_count_once_per_prompt():
    data = submit(1, part=1).closing
    placed = wire.Placed(handle=1, replica_id="r", cached_tokens=6)
    assert RequestEvent.FromString(closed(data, 10, placed, "r")).cached_tokens == 0
    data = submit(1).closing
    assert RequestEvent.FromString(closed(data, 10, placed, "r")).cached_tokens == 6


def test_a_closing_says_how_long_an_adapter_was_waited_for():
    placed = wire.Placed(handle=1, replica_id="r", engine_queue_us=9, load_us=8)
    event = RequestEvent.FromString(closed(submit(1).closing, 10, placed, "r"))
    assert (event.engine_queue_us, event.load_us) == (9, 8)


def test_many_ended_answers_are_closed_little_by_little():
    accounts, closings, gateway = world()
    for handle in range(1000):
        accounts.submitted([submit(handle)])
        accounts.note_outcomes(ended(handle, 3), now=0.0)
    closings.cut(accounts, gateway, now=1.0)
    seen: list[int] = []
    while closings.has_work:
        closings.settle(lambda _: True, now=1.0)
        seen.append(len(told(closings)))
    assert sum(seen) == 1000
    assert max(seen) <= 200


def test_requests_of_which_nothing_is_known_make_their_hour_incomparable():
    counts = TokenCounts("router", 1)
    accounts = Accounts(counts)
    hour_ms = 1000 * HOUR_MS
    assert accounts.submitted([submit(1)])
    assert not accounts.submitted([submit(2), wire.Submit(handle=3), submit(4)])
    counts.mix(hour_ms + 5)
    events = [RequestEvent.FromString(data) for data in counts.reports(hour_ms + 5)]
    found = {it.received_at_unix_ms for it in events if it.model == OTHER}
    assert found == {hour_ms, hour_ms - HOUR_MS}  # it may have come before the hour struck


def test_a_silent_or_nonsensical_gateway_harms_no_other():
    accounts, closings, gateway = world()
    accounts.submitted([wire.Submit(handle=1), wire.Submit(handle=2, closing=b"\xff\xff")])
    gateway.requests = {1: running(1, 3), 2: Request(handle=2, cell_id="c", prompt_tokens=7)}
    closings.cut(accounts, gateway, now=0.0)
    closings.settle(lambda _: True, now=0.0)
    assert not closings.has_work


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=40))
def test_each_request_is_told_once(outcomes: list[tuple[int, int]]):
    accounts, closings, gateway = world()
    accounts.submitted(submit(handle) for handle in range(10))
    last = dict(reversed(outcomes))  # the first outcome of a handle counts
    for handle, tokens in outcomes:
        accounts.note_outcomes(ended(handle, tokens), now=0.0)
    gateway.requests = {it: running(it, 1) for it in range(10) if it not in last}
    closings.cut(accounts, gateway, now=1.0)
    closings.settle(lambda _: True, now=1.0)
    expected = {f"e{handle}": last.get(handle, 1) for handle in range(10)}
    assert {key: it.output_tokens for key, it in told(closings).items()} == expected


def test_the_details_of_a_placement_are_not_kept():
    accounts, closings, gateway = world()
    accounts.submitted([submit(1)])
    batch = ended(1, 5)
    batch.placed[0].queue_us = 9
    batch.placed[0].load_us = 4
    batch.placed[0].decision.reason = "x" * 10_000
    batch.placed[0].before.add(reason="y")
    accounts.note_outcomes(batch, now=0.0)
    [kept] = accounts.ended(0.0)
    assert kept.placed == wire.Placed(replica_id="r", cached_tokens=2, queue_us=9, load_us=4)
    closings.cut(accounts, gateway, now=1.0)
    closings.settle(lambda _: True, now=1.0)
    [event] = told(closings).values()
    assert (event.replica_id, event.cached_tokens, event.queue_us) == ("r", 2, 9)


def test_prompts_of_gateways_that_do_not_say_which_are_new_are_not_compared():
    counts = TokenCounts("router", 1)
    event = RequestEvent(event_id="e", prompt_tokens=7, model="m")
    for handle, (model, knows) in enumerate([("old", False), ("new", True), ("both", True)]):
        event.model = model
        accounts = Accounts(counts, counts_prompts=knows)
        accounts.submitted([wire.Submit(handle=handle, closing=event.SerializeToString())])
        accounts.note_outcomes(ended(handle, 3), now=0.0)
    event.model = "both"
    data = event.SerializeToString()
    Accounts(counts, counts_prompts=False).submitted([wire.Submit(handle=9, closing=data)])
    found = [RequestEvent.FromString(data) for data in counts.reports(0)]
    known = {it.model: it.count.has_prompts for it in found}
    assert known == {"old": False, "new": True, "both": False, "": True}


def prompts(counts: TokenCounts) -> tuple[int, int, int, int]:
    """Certain, uncertain, discarded and resumed prompt tokens."""
    counts.add((0, ""), 0)  # a report tells what changed
    [found, _] = [RequestEvent.FromString(data).count for data in counts.reports(0)]
    assert found.has_prompts
    return (
        found.prompt_tokens,
        found.uncertain_prompt_tokens,
        found.discarded_prompt_tokens,
        found.resumed_prompt_tokens,
    )


def asked(handle: int, tokens: int, *, part: int = 0, was_placed: bool = False) -> wire.Submit:
    message = submit(handle, of="e" if part else "", part=part)
    message.prompt.extend(range(tokens))
    message.was_placed = was_placed
    return message


def test_prompts_count_once_and_where_their_gateways_know_of_them():
    counts = TokenCounts("router", 1)
    accounts, closings, gateway = Accounts(counts), Closings("router", counts), ConnectedGateway(1)
    heard = wire.ConnectRequest(cancels=[4, 5], cancel_took=[0, 0], cancel_placed=[True, False])
    accounts.submitted(
        [
            asked(1, 100),
            asked(2, 100, part=1),  # another answer to it
            asked(3, 130, was_placed=True),  # resumed, with what it had brought
            asked(4, 10),
            asked(5, 20),
            asked(6, 40),
            asked(7, 3),
        ]
    )
    accounts.cancelled(heard)
    for handle in (1, 2, 3, 4, 5):
        accounts.note_outcomes(ended(handle, 1), now=0.0)
    moved = GatewayBatch()  # its replica was lost before its first token, and another one took it
    moved.placed.extend(wire.Placed(handle=6, replica_id=name) for name in "ab")
    accounts.note_outcomes(moved, now=0.0)
    queued = GatewayBatch()
    queued.outcomes.append(wire.Outcome(handle=7, kind=wire.OUTCOME_KIND_EVICTED))
    accounts.note_outcomes(queued, now=0.0)
    assert prompts(counts) == (110, 0, 20, 130)
    late = wire.ConnectRequest(cancels=[4], cancel_took=[0], cancel_placed=[False])
    accounts.cancelled(late)  # what it was told did not reach it
    assert prompts(counts) == (100, 0, 30, 130)
    gateway.requests = {6: running(6, 0)}
    closings.cut(accounts, gateway, now=1.0)
    closings.settle(lambda _: True, now=1.0)
    assert prompts(counts) == (0, 100 + 10 + 20 + 40, 0, 130 + 40)
