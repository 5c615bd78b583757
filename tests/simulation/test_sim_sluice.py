"""The real router core under the routing simulation: it serves everything, and knows only old news."""

from collections.abc import Sequence

import pytest

from replica.drivers.sim_costs import MODELS_BY_NAME
from router.core import invariants
from router.core.fleet.prefix_index import BlockHashes
from sim.engines import Engine, Job
from sim.metrics import measure
from sim.policies.sluice import RouterSettings, Sluice
from sim.pool import SimPool, SimPoolPlan
from sim.synthetic import Synthetic, generate
from sim.workload import Trace, TraceRequest
from sluice.wire.engine.v1 import engine_pb2 as engine

CONVERSATIONS = Synthetic(requests=300, rate=4.0, prompt=3000, output=60, turns=4, systems=2)


def play(
    *, settings: RouterSettings | None = None, plan: SimPoolPlan | None = None, seed: int = 1
) -> tuple[SimPool, Sluice]:
    policy = Sluice(settings or RouterSettings())
    cost = MODELS_BY_NAME["h70"]
    pool = SimPool(policy, cost, plan or SimPoolPlan(3), block_tokens=512)
    pool.run(generate(CONVERSATIONS, seed=seed))
    return pool, policy


def check(pool: SimPool, policy: Sluice) -> None:
    """Assert that everybody was served and that the router's books agree with the engines."""
    assert not policy.refusals
    assert all(job.ended_at is not None for job in pool.jobs)
    assert all(job.emitted + job.output_tokens == job.request.output_tokens for job in pool.jobs)
    for core in policy.cores:
        invariants.check(core)
        assert not core.live_requests
        assert not any(book.dispatches for book in core.replicas.values())
        stats = core.take_stats()
        assert not stats.count_mismatches
        assert not stats.stray_tokens
    for number in pool.alive:
        assert pool.engines[number].cache.is_at_rest
        assert not pool.engines[number].held


@pytest.mark.parametrize("cells", [1, 3])
def test_everything_is_served_and_books_agree(cells: int):
    pool, policy = play(
        settings=RouterSettings(cells=cells), plan=SimPoolPlan(6, speed_spread=0.15)
    )
    check(pool, policy)
    computed = sum(replica.prefilled_tokens for replica in pool.engines)
    assert computed == sum(job.prompt_tokens - job.hit_tokens for job in pool.jobs)
    assert all(replica.prefilled_tokens for replica in pool.engines)
    assert measure(pool).hit_ratio > 0.1


def test_the_same_seed_gives_the_same_run():
    one, two, other = (play(seed=seed)[0] for seed in (1, 1, 2))
    assert [job.ended_at for job in one.jobs] == [job.ended_at for job in two.jobs]
    assert [job.ended_at for job in one.jobs] != [job.ended_at for job in other.jobs]


@pytest.mark.parametrize("cells", [1, 2])
def test_a_replica_lost_and_one_added_cost_no_request(cells: int):
    plan = SimPoolPlan(4, lose_at_s=15.0, add_at_s=25.0)
    pool, policy = play(settings=RouterSettings(cells=cells), plan=plan)
    check(pool, policy)
    assert policy.resumes == sum(1 for job in pool.jobs if job.emitted) > 0
    assert pool.engines[4].prefilled_tokens > 0
    assert pool.alive == [1, 2, 3, 4]


def test_conversations_stay_in_their_cells_unless_one_is_too_busy():
    pool, _ = play(settings=RouterSettings(cells=2), plan=SimPoolPlan(4))
    cells: dict[int, list[int]] = {}
    for job in pool.jobs:
        cells.setdefault(job.request.session, []).append(job.replica % 2)
    at_home = sum(max(turns.count(0), turns.count(1)) for turns in cells.values())
    assert at_home > 0.85 * len(pool.jobs)
    assert {cell for turns in cells.values() for cell in turns} == {0, 1}


class Watched(Sluice):
    """Notes when frames reach the core, and what was true of the engine when they were made."""

    def bind(self, pool: SimPool) -> None:
        """Bind, and listen at the core."""
        self.delivered: list[tuple[float, engine.StepFrame]] = []
        self.changes: dict[tuple[int, bool], float] = {}
        super().bind(pool)
        core = self.cores[0]
        inner = core.on_frame

        def on_frame(replica_id: str, epoch: int, frame: engine.StepFrame, now: float) -> None:
            self.delivered.append((now, frame))
            inner(replica_id, epoch, frame, now)

        core.on_frame = on_frame  # type: ignore[method-assign]

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """Note the first time."""
        self.changes.setdefault((block, is_stored), self.pool.now)
        super().block_changed(replica, block, is_stored=is_stored)


def test_the_router_sees_the_fleet_with_the_given_delay():
    policy = Watched(RouterSettings(report_age_s=0.25, index_delay_s=2.0))
    pool = SimPool(
        policy, MODELS_BY_NAME["h70"], SimPoolPlan(1, kv_tokens=20_480), block_tokens=512
    )
    requests = [
        TraceRequest(float(n), 3000, 5, tuple(range(10 * n, 10 * n + 6)), -1) for n in range(12)
    ]
    pool.run(Trace("t", 512, tuple(requests)))
    finished = {entry.sequence: now for now, frame in policy.delivered for entry in frame.finished}
    for job in pool.jobs:
        assert job.ended_at is not None
        assert finished[job.sequence] == pytest.approx(job.ended_at + 0.25)
    told = 0
    for now, frame in policy.delivered:
        for blocks, is_stored in (
            (BlockHashes(frame.kv_events.stored), True),
            (BlockHashes(frame.kv_events.removed), False),
        ):
            for block in blocks:
                told += 1
                assert now >= policy.changes[block, is_stored] + 2.0
    assert told > 60, "most of the blocks, and evictions"


def test_frames_report_the_work_of_the_engine():
    records: list[engine.StepFrame] = []

    class Collected(Sluice):
        def _deliver(self, link: object, frame: engine.StepFrame) -> None:
            records.append(frame)
            super()._deliver(link, frame)  # type: ignore[arg-type]

    policy = Collected(RouterSettings())
    pool = SimPool(policy, MODELS_BY_NAME["h70"], SimPoolPlan(1), block_tokens=512)
    pool.run(generate(CONVERSATIONS, seed=3))
    check(pool, policy)
    emitted: dict[int, int] = {}
    for frame in records:
        assert sum(frame.count) == len(frame.token)
        for sequence, number in zip(frame.sequence, frame.count, strict=True):
            emitted[sequence] = emitted.get(sequence, 0) + number
    assert emitted == {job.sequence: job.request.output_tokens for job in pool.jobs}
    cached = {entry.sequence: entry.cached_tokens for f in records for entry in f.admitted}
    assert cached == {job.sequence: job.hit_tokens for job in pool.jobs}
    # The last frame covers each step once, so that the steps add up.
    steps = [frame for frame in records if frame.state.step_us]
    assert sum(frame.steps for frame in steps) == pool.engines[0].steps


def test_a_first_token_is_taken_at_the_engine():
    def first_s(age_s: float) -> float:
        policy = Sluice(RouterSettings(report_age_s=age_s))
        pool = SimPool(policy, MODELS_BY_NAME["h70"], SimPoolPlan(1), block_tokens=512)
        pool.run(Trace("t", 512, (TraceRequest(0.0, 2000, 3, tuple(range(4)), -1),)))
        first_at = pool.jobs[0].first_at
        assert first_at is not None
        return first_at

    assert first_s(0.0) == first_s(1.0)


def test_lost_jobs_keep_the_tokens_of_earlier_frames():
    told: dict[int, int] = {}

    class Collected(Sluice):
        def _stepped(self, serving: Engine, record: object) -> None:
            super()._stepped(serving, record)  # type: ignore[arg-type]
            for job in serving.decoding.values():
                told[job.number] = serving.steps - job.first_step + 1

        def lost(self, replica: int, jobs: Sequence[Job]) -> None:
            for job in jobs:
                assert job.emitted == (told[job.number] if job.first_step >= 0 else 0)
            self.seen = len(jobs)
            super().lost(replica, jobs)

    policy = Collected(RouterSettings())
    plan = SimPoolPlan(2, lose_at_s=20.01)
    pool = SimPool(policy, MODELS_BY_NAME["h70"], plan, block_tokens=512)
    pool.run(generate(CONVERSATIONS, seed=1))
    check(pool, policy)
    assert policy.seen > 3
