from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.core import ScheduledEngine
from replica.engine.plan import StepFailedError
from replica.engine.types import (
    URGENT_PRIORITY,
    Finish,
    Limits,
    RefusedError,
    Sampling,
    SequenceRequest,
    StepEvents,
)
from sluice.hashing import BLOCK_TOKENS

EOS = frozenset({7})


def request(key: int, prompt: list[int], count: int = 5, **options) -> SequenceRequest:
    return SequenceRequest(key, prompt, count, **options)


@st.composite
def workloads(draw: st.DrawFn) -> list[dict]:
    """Sequences with shared beginnings, arrival steps, cancels, priorities and roots."""
    prefixes = [
        [(base * 13 + i) % 190 for i in range(draw(st.integers(1, 150)))] for base in range(3)
    ]
    jobs = []
    for key in range(draw(st.integers(1, 14))):
        tail = draw(st.lists(st.integers(0, 199), min_size=1, max_size=40))
        jobs.append(
            {
                "key": key,
                "prompt": prefixes[draw(st.integers(0, 2))] + tail,
                "count": draw(st.integers(1, 70)),
                "arrives": draw(st.integers(0, 30)),
                "cancel_after": draw(st.one_of(st.none(), st.integers(0, 20))),
                "priority": draw(st.sampled_from([0, 1, 2, 2, URGENT_PRIORITY])),
                "root": draw(st.sampled_from([b"", b"a" * 16, b"b" * 16])),
                "ignore_eos": draw(st.booleans()),
            }
        )
    return jobs


class Run:
    """Drives an engine through a workload and checks what must hold after every step."""

    def __init__(self, engine: ScheduledEngine, jobs: list[dict]) -> None:
        self.engine = engine
        self.jobs = {job["key"]: job for job in jobs}
        self.coming = sorted(jobs, key=lambda job: job["arrives"])
        self.tokens: dict[int, list[int]] = {key: [] for key in self.jobs}
        self.ended: dict[int, Finish] = {}
        self.admitted: Counter[int] = Counter()
        self.index: set[bytes] = set()
        self.steps = 0

    def to_end(self) -> None:
        while self.coming or self.engine.has_work:
            self.steps += 1
            assert self.steps < 10_000, self.engine.load()
            self.arrive()
            for key, job in self.jobs.items():
                if job["cancel_after"] == len(self.tokens[key]) and job not in self.coming:
                    self.engine.cancel(key)
            self.note(self.engine.step())
            self.check()

    def arrive(self) -> None:
        while self.coming and self.coming[0]["arrives"] <= self.steps:
            job = self.coming.pop(0)
            self.engine.add(
                request(
                    job["key"],
                    job["prompt"],
                    job["count"],
                    priority=job["priority"],
                    cache_root=job["root"],
                    ignore_eos=job["ignore_eos"],
                )
            )

    def note(self, events: StepEvents) -> None:
        assert len(set(events.keys)) == len(events.keys)
        for key, token in zip(events.keys, events.tokens, strict=True):
            assert key not in self.ended
            self.tokens[key].append(token)
        for event in events.finished:
            assert event.key not in self.ended
            self.ended[event.key] = event.reason
            assert event.output_tokens == len(self.tokens[event.key])
        self.admitted.update(event.key for event in events.admitted)
        self.index |= {key for key, is_cached in events.kv.items() if is_cached}
        self.index -= {key for key, is_cached in events.kv.items() if not is_cached}

    def check(self) -> None:
        assert self.index == set(self.engine.cached_blocks())
        pool, load = self.engine.scheduler.pool, self.engine.load()
        pool.check()
        urgent = sum(job["priority"] == URGENT_PRIORITY for job in self.jobs.values())
        assert load.running <= self.engine.limits.sequences_max + urgent
        assert load.kv_blocks_used == pool.used


@settings(max_examples=80, deadline=None)
@given(
    jobs=workloads(),
    blocks=st.integers(9, 30),
    sequences=st.integers(1, 6),
    extra=st.integers(0, 90),
)
def test_any_workload_ends_once_with_the_right_tokens(
    make_engine, expected_output, jobs, blocks, sequences, extra
) -> None:
    engine = make_engine(blocks=blocks, sequences=sequences, step_tokens=sequences + extra)
    run = Run(engine, jobs)
    run.to_end()
    assert run.ended.keys() == run.jobs.keys()
    assert max(run.admitted.values(), default=1) == 1
    for key, job in run.jobs.items():
        got = run.tokens[key]
        stop = frozenset() if job["ignore_eos"] else EOS
        wanted = expected_output(job["prompt"], job["count"], stop=stop)
        if run.ended[key] is Finish.CANCELLED:
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
            assert run.ended[key] is (Finish.STOP if got[-1] in stop else Finish.LENGTH)
    load = engine.load()
    assert (load.running, load.waiting, load.kv_blocks_used, load.prefill_tokens_owed) == (0,) * 4


def test_a_shared_beginning_is_computed_once(make_engine, run_to_end) -> None:
    engine = make_engine()
    prompt = [i % 150 for i in range(100)]
    admitted = {}

    def note(events: StepEvents) -> None:
        admitted.update({event.key: event.cached_tokens for event in events.admitted})

    engine.add(request(1, prompt))
    run_to_end(engine, note)
    engine.add(request(2, prompt))
    engine.add(request(3, prompt, cache_root=b"other tenant's.."))
    run_to_end(engine, note)
    assert admitted == {1: 0, 2: 96, 3: 0}
    assert (engine.load().prompt_tokens, engine.load().cached_tokens) == (300, 96)


def test_a_prompt_of_whole_blocks_leaves_one_block_to_compute(make_engine, run_to_end) -> None:
    engine = make_engine()
    prompt = list(range(2 * BLOCK_TOKENS))
    engine.add(request(1, prompt))
    first = run_to_end(engine)
    cached = []
    engine.add(request(2, prompt))
    second = run_to_end(engine, lambda events: cached.extend(events.admitted))
    assert cached[0].cached_tokens == BLOCK_TOKENS
    assert first[1] == second[2]


def test_long_prompts_are_computed_in_chunks_beside_decoding_rows(make_engine) -> None:
    engine = make_engine(step_tokens=32, sequences=4)
    engine.add(request(1, [1, 2, 3], 50, ignore_eos=True))
    engine.step()
    engine.add(request(2, [i % 100 for i in range(200)], 5))
    for _ in range(6):  # 31 tokens per step beside one decoding row: 200 tokens need 7 steps
        assert engine.step().keys == [1]
    assert engine.step().keys == [1, 2]


def test_the_least_important_is_preempted_and_goes_on_later(
    make_engine, expected_output, run_to_end
) -> None:
    engine = make_engine(blocks=8, sequences=4)
    finished = []
    engine.add(request(1, [1] * 20, 200, priority=1, ignore_eos=True))
    engine.add(request(2, [2] * 20, 200, priority=5, ignore_eos=True))
    engine.add(request(3, [3] * 20, 100, priority=1, ignore_eos=True))
    out = run_to_end(engine, lambda events: finished.extend(events.finished))
    assert engine.load().preemptions > 0
    assert finished[0].key == 2
    for key, count in ((1, 200), (2, 200), (3, 100)):
        assert out[key] == expected_output([key] * 20, count, stop=frozenset())


def test_a_probe_does_not_wait_for_a_full_engine(make_engine, expected_output, run_to_end) -> None:
    engine = make_engine(blocks=9, sequences=2, step_tokens=2)
    for key in (1, 2, 3):
        engine.add(request(key, [key] * 100, 20, ignore_eos=True))
    while engine.load().running < 2:
        engine.step()
    assert engine.scheduler.pool.available == 1
    engine.add(request(9, [9] * 40, 1, priority=URGENT_PRIORITY))
    tokens: list[int] = []
    for _ in range(3):  # 16 prompt tokens per step, however full the step is
        assert 9 not in tokens
        tokens += engine.step().keys
    assert 9 in tokens
    assert engine.load().preemptions == 1
    out = run_to_end(engine)
    for key in (2, 3):
        assert out[key] == expected_output([key] * 100, 20, stop=frozenset())


def test_admission_leaves_room_to_those_who_run(make_engine) -> None:
    engine = make_engine(blocks=4, sequences=4, step_tokens=128)
    engine.add(request(1, [1] * 60, 30, ignore_eos=True))
    engine.step()
    engine.add(request(2, [2] * 60, 2))  # two blocks are free, but one is kept
    engine.step()
    assert (engine.load().running, engine.load().waiting) == (1, 1)
    assert engine.load().prefill_tokens_owed == 60


def test_a_cancel_frees_its_blocks_before_the_next_step(make_engine) -> None:
    engine = make_engine()
    engine.add(request(1, [1] * 40, 50))
    engine.add(request(2, [2] * 40, 50))
    engine.step()
    engine.cancel(1)
    engine.cancel(1)
    engine.cancel(99)
    events = engine.step()
    assert [(event.key, event.reason) for event in events.finished] == [(1, Finish.CANCELLED)]
    assert engine.load().kv_blocks_used == 2


def test_a_failed_step_fails_its_sequences_and_no_others(make_engine, run_to_end) -> None:
    engine = make_engine(sequences=1)
    engine.add(request(1, [1, 2, 3]))
    engine.add(request(2, [1, 2, 3]))
    run = engine._backend.run
    engine._backend.run = lambda plan: (_ for _ in ()).throw(StepFailedError("out of luck"))
    events = engine.step()
    assert [(e.key, e.reason, e.code) for e in events.finished] == [
        (1, Finish.FAILED, "engine_failed")
    ]
    assert "out of luck" in events.finished[0].message
    engine._backend.run = run
    assert set(run_to_end(engine)) == {2}
    assert engine.load().kv_blocks_used == 0


def test_stop_ids_end_a_sequence_besides_the_models_own(
    make_engine, expected_output, run_to_end
) -> None:
    prompt = [5, 6, 7]
    free = expected_output(prompt, 20, stop=frozenset())
    stop = free[4]
    engine = make_engine()
    engine.add(request(1, prompt, 20, stop_token_ids=frozenset({stop})))
    finished = []
    out = run_to_end(engine, lambda events: finished.extend(events.finished))
    assert out[1] == expected_output(prompt, 20, stop=EOS | {stop})
    assert out[1][-1] == stop
    assert finished[0].reason is Finish.STOP


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"prompt": []}, "invalid_request", "empty"),
        ({"output_tokens_max": 0}, "invalid_request", "at least one"),
        ({"prompt": [200]}, "invalid_request", "vocabulary of 200"),
        ({"prompt": [1] * 900, "output_tokens_max": 200}, "context_length_exceeded", "1000"),
        ({"prompt": [1] * 90}, "context_length_exceeded", "has 2"),
        ({"cache_root": b"short"}, "invalid_request", "5 bytes"),
        ({"adapter_digest": "ab" * 32}, "unsupported_parameter", "abababababab"),
        ({"stop_token_ids": frozenset(range(65))}, "invalid_request", "65"),
        ({"sampling": Sampling(temperature=float("nan"))}, "invalid_request", "temperature"),
        ({"sampling": Sampling(temperature=-1)}, "invalid_request", "temperature"),
        ({"sampling": Sampling(top_p=1.5)}, "invalid_request", "top_p"),
        ({"sampling": Sampling(top_p=float("nan"))}, "invalid_request", "top_p"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_limit(make_engine, changes, code, text) -> None:
    engine = make_engine(blocks=2)
    values = {"key": 1, "prompt": [1, 2], "output_tokens_max": 3, **changes}
    with pytest.raises(RefusedError, match=text) as caught:
        engine.add(SequenceRequest(**values))
    assert caught.value.code == code
    assert not engine.has_work


def test_limits_under_which_an_engine_could_stand_still_are_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens_max"):
        Limits(100, 8, 4, 10, 100)
