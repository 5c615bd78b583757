"""Rollouts' windows from the real trace store, against the same counts in plain Python."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from sluice.buckets import bucket_of
from sluice.errors import ErrorCode, ErrorEvidence
from sluice.wire.telemetry.v1.telemetry_pb2 import ARM_CANARY, ARM_CONTROL, RequestEvent
from telemetry.evidence import ArmCounts, WindowCounts, complete_windows, rollout_windows
from telemetry.queries import RequestFilter, recent_requests
from telemetry.rows import RowBatch
from telemetry.scores import ScoreCounts
from telemetry.store import Store
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real

WINDOW_MS = 10_000
BEGIN_MS = 1_790_000_000_000
WINDOWS = 6


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


def random_event(random: Random, number: int) -> RequestEvent:
    """Return an event with whatever may happen to a request; most belong to rollout `r`."""
    faults = [code for code in ErrorCode if code.policy.release is ErrorEvidence.FAULT]
    outcomes = ["stop", "length", "tool_calls", *faults, ErrorCode.CLIENT_CLOSED, "unheard_of"]
    outcome = random.choice(outcomes)
    status = 200 if outcome in outcomes[:3] else random.choice([200, 400, 503])
    is_stream = random.random() < 0.7
    is_copy = random.random() < 0.1
    ttft_us = int(10 ** random.uniform(2, 10)) % 2**32
    return RequestEvent(
        schema_version=1,
        event_id=f"e{number}",
        received_at_unix_ms=BEGIN_MS + random.randrange(-1_000, WINDOWS * WINDOW_MS + 1_000),
        tenant_id=random.choice("abc"),
        session_hash=random.choice([0, 0, random.randrange(1, 9), 2**64 - random.randrange(1, 5)]),
        rollout_id=random.choice(["r", "r", "r", "s", ""]),
        arm=ARM_CANARY if is_copy else random.choice([0, ARM_CONTROL, ARM_CONTROL, ARM_CANARY]),
        is_copy=is_copy,
        is_pinned=random.random() < 0.1,
        is_refusal=random.random() < 0.2,
        is_empty=random.random() < 0.2,
        is_repetitive=random.random() < 0.2,
        choices=random.choice([0, 1, 1, 2]),
        is_stream=is_stream,
        ttft_us=ttft_us if is_stream and random.random() < 0.9 else 0,
        total_us=random.choice([ttft_us, min(2**32 - 1, ttft_us + random.randrange(10**9))]),
        gateway_us=random.randrange(10_000),
        queue_us=random.choice([0, 2**32 - 1, 2**19]),
        engine_queue_us=random.randrange(10_000),
        prefill_us=random.randrange(10_000),
        output_tokens=random.choice([0, 1, 2, 3, 2 ** random.randrange(32), 100]),
        outcome=str(outcome),
        status=status,
    )


def random_score(random: Random, number: int) -> RequestEvent:
    """Return a score of an answer, which may have failed, or be of another rollout."""
    is_made = random.random() < 0.9
    return RequestEvent(
        schema_version=1,
        event_id=f"s{number}",
        received_at_unix_ms=BEGIN_MS + random.randrange(-40_000, WINDOWS * WINDOW_MS + 1_000),
        tenant_id=random.choice("ab"),
        session_hash=random.choice([0, random.randrange(1, 400)]),
        scored_rollout_id=random.choice(["r", "r", "s"]),
        arm=random.choice([ARM_CONTROL, ARM_CANARY]),
        is_copy=True,
        total_us=random.randrange(30_000_000),
        output_tokens=2,
        outcome="length" if is_made else "overloaded",
        status=200 if is_made else 503,
        base_logprob=-random.choice([1.0, 1.005, 1.02, 4.0]),
        answer_logprob=-1.0,
        answer_entropy=random.choice([0.0, 0.5, 3.0]),
    )


def expected_scores(events: Iterable[RequestEvent], window: int, arm: int) -> ScoreCounts:
    """Return the scores of a window, by when they were made."""
    heard: set[object] = set()
    counts = Counter[str]()
    surprisal, entropy = Counter[int](), Counter[int]()
    made = sorted(
        (it.received_at_unix_ms + it.total_us // 1000, it.event_id, it)
        for it in events
        if (it.scored_rollout_id, it.arm, it.status) == ("r", arm, 200)
    )
    for made_ms, _, it in made:
        session = (it.tenant_id, it.session_hash) if it.session_hash else it.event_id
        if session not in heard and (made_ms - BEGIN_MS) // WINDOW_MS == window:
            counts["answers"] += 1
            counts["base_like"] += it.answer_logprob - it.base_logprob < 0.01
            surprisal[bucket_of(-1000 * it.base_logprob)] += 1
            entropy[bucket_of(1000 * it.answer_entropy)] += 1
        heard.add(session)
    return ScoreCounts(**counts, surprisal_mnats=surprisal, entropy_mnats=entropy)


async def test_scores_are_of_the_window_in_which_they_were_made(store: Store) -> None:
    random = Random(7)
    scores = [random_score(random, number) for number in range(1_000)]
    await store.insert(RowBatch([*scores, *(random_event(random, number) for number in range(50))]))
    await store.insert(RowBatch(scores[300:500]))  # again
    starts_ms = complete_windows(BEGIN_MS, BEGIN_MS + WINDOWS * WINDOW_MS, WINDOW_MS)
    found = await rollout_windows(store, "r", starts_ms)
    for number, window in enumerate(found):
        assert window.canary.scores == expected_scores(scores, number, ARM_CANARY)
        assert window.control.scores == expected_scores(scores, number, ARM_CONTROL)
    assert found[0].canary.scores.base_like
    assert sum(it.canary.requests + it.control.requests for it in found) < 50, "none is a request"


def expected(events: Iterable[RequestEvent], rollout_id: str) -> list[WindowCounts]:
    """Return what the windows must be, by the words of `Arm` and not by those of the query."""
    arms: dict[tuple[int, bool], list[RequestEvent]] = {}
    seen: set[object] = set()
    heard: set[object] = set()  # all windows together are shorter than a session may be quiet
    first: set[str] = set()
    ordered = sorted(events, key=lambda event: (event.received_at_unix_ms, event.event_id))
    for event in ordered:
        if event.rollout_id != rollout_id or event.is_pinned or event.arm == 0:
            continue
        is_canary = event.arm == ARM_CANARY
        window = (event.received_at_unix_ms - BEGIN_MS) // WINDOW_MS
        session = (event.tenant_id, event.session_hash) if event.session_hash else event.event_id
        if (window, is_canary, session) not in seen:
            seen.add((window, is_canary, session))
            arms.setdefault((window, is_canary), []).append(event)
            if (is_canary, session) not in heard:
                first.add(event.event_id)
            heard.add((is_canary, session))
    return [
        WindowCounts(
            BEGIN_MS + window * WINDOW_MS,
            BEGIN_MS + (window + 1) * WINDOW_MS,
            control=arm_of(arms.get((window, False), []), first),
            canary=arm_of(arms.get((window, True), []), first),
        )
        for window in range(WINDOWS)
    ]


def arm_of(events: Sequence[RequestEvent], first: set[str]) -> ArmCounts:
    errors: Counter[str] = Counter()
    flaws: Counter[str] = Counter()
    ttft_ms: Counter[int] = Counter()
    tpot_us: Counter[int] = Counter()
    output_tokens: Counter[int] = Counter()
    for event in events:
        first_us = event.ttft_us
        if not first_us and event.output_tokens:
            stages = (event.gateway_us, event.queue_us, event.engine_queue_us, event.prefill_us)
            first_us = sum(stages)
        if first_us:
            ttft_ms[bucket_of(first_us / 1000)] += 1
        if event.outcome in set(ErrorCode):
            errors[event.outcome] += 1
        elif event.status >= 400:
            errors["internal" if event.status >= 500 else "invalid_request"] += 1
        else:
            if event.event_id in first:
                flaws["first_answers"] += 1
                flaws["refusals"] += event.is_refusal
                flaws["empty_answers"] += event.is_empty
                flaws["repetitive_answers"] += event.is_repetitive
                flaws["cut_answers"] += event.outcome == "length"
                output_tokens[bucket_of(event.output_tokens)] += 1
            spent_us, gaps = event.total_us - first_us, event.output_tokens - 1
            if first_us and spent_us >= 0 and gaps >= 1 and event.choices <= 1:
                tpot_us[bucket_of(spent_us / gaps)] += 1
    return ArmCounts(
        len(events),
        errors,
        ttft_ms=ttft_ms,
        tpot_us=tpot_us,
        output_tokens=output_tokens,
        **flaws,
    )


@pytest.mark.parametrize("seed", range(3))
async def test_windows_equal_the_reference(store: Store, seed: int) -> None:
    random = Random(seed)
    events = [random_event(random, number) for number in range(3_000)]
    await store.insert(RowBatch(events[:2_000]))
    # Again what was written already, as after a crash, and as parts that are not merged.
    await store.insert(RowBatch(events[1_500:]))
    await store.insert(RowBatch(random.sample(events, 500)))
    starts_ms = complete_windows(BEGIN_MS, BEGIN_MS + WINDOWS * WINDOW_MS + 999, WINDOW_MS)
    for rollout_id in ("r", "s"):
        found = await rollout_windows(store, rollout_id, starts_ms)
        assert list(found) == expected(events, rollout_id)
        assert found[0].canary.requests
        assert found[-1].control.requests
    nothing = await rollout_windows(store, "unknown", starts_ms)
    assert [window.canary.requests + window.control.requests for window in nothing] == [0] * WINDOWS
    # Whatever counts clients' requests does not count copies.
    originals = {event.event_id for event in events if not event.is_copy}
    rows = await recent_requests(store, RequestFilter(), limit=1_000)
    assert len(rows) == 1_000
    assert {row["event_id"] for row in rows} <= originals
    copies = await recent_requests(store, RequestFilter(are_copies=True), limit=1_000)
    assert {row["event_id"] for row in copies} == {e.event_id for e in events if e.is_copy}
    assert {row["arm"] for row in copies} == {"canary"}


async def test_properties_of_answers_are_counted_once_per_session(store: Store) -> None:
    """A session that was quiet for five minutes is a new one; whoever has none counts each time."""
    seconds = {7: (0, 9, 12, 200, 600, 615), 8: (605,), 0: (1, 2, 300, 301)}
    events = [
        RequestEvent(
            schema_version=1,
            event_id=f"e{session}-{second}",
            received_at_unix_ms=BEGIN_MS + second * 1_000,
            tenant_id="a",
            session_hash=session,
            rollout_id="r",
            arm=ARM_CONTROL,
            is_repetitive=True,
            outcome="stop",
            status=200,
            output_tokens=5,
        )
        for session, all_of_it in seconds.items()
        for second in all_of_it
    ]
    await store.insert(RowBatch(events))
    found = {}
    # In parts: what came before a part's first window is known, too.
    for begin_ms, end_ms in ((0, 200_000), (200_000, 610_000), (610_000, 620_000)):
        starts_ms = complete_windows(BEGIN_MS + begin_ms, BEGIN_MS + end_ms, WINDOW_MS)
        for window in await rollout_windows(store, "r", starts_ms):
            found[(window.start_ms - BEGIN_MS) // 1_000] = window.control
    requests = {second: arm.requests for second, arm in found.items() if arm.requests}
    assert requests == {0: 3, 10: 1, 200: 1, 300: 2, 600: 2, 610: 1}
    first = {second: arm.first_answers for second, arm in found.items() if arm.first_answers}
    assert first == {0: 3, 300: 2, 600: 2}
    assert {second: arm.repetitive_answers for second, arm in found.items() if arm.requests} == (
        dict.fromkeys(requests, 0) | first
    )
