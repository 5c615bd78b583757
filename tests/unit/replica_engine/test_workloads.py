"""Compares two engines under random workloads with a reference that has no cache or batch."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.core import ScheduledEngine
from replica.engine.types import (
    URGENT_PRIORITY,
    Finish,
    Fork,
    Sampling,
    SequenceRequest,
    StepEvents,
)
from sluice.hashing import BLOCK_TOKENS, block_hashes, cache_root

EOS = frozenset({7})
SLOTS = 2
STEPS_MAX = 3000  # far more than the few hundred steps of a workload's tokens


def digest_of(adapter: int) -> str:
    return f"{adapter:064x}" if adapter else ""


def root_of(job: dict) -> bytes:
    return cache_root("base", digest_of(job["adapter"]), job["salt"])


@st.composite
def workloads(draw: st.DrawFn) -> list[dict]:
    """Draw sequences with common beginnings, each with some options of a request."""
    prefixes = [
        [(base * 13 + i) % 190 for i in range(draw(st.integers(1, 150)))] for base in range(3)
    ]
    jobs = []
    for key in range(draw(st.integers(1, 12))):
        tail = draw(st.lists(st.integers(0, 199), min_size=1, max_size=40))
        jobs.append(
            {
                "key": key,
                "engine": draw(st.integers(0, 1)),
                "prompt": prefixes[draw(st.integers(0, 2))] + tail,
                "count": draw(st.integers(1, 60)),
                "arrives": draw(st.integers(0, 30)),
                "cancels": draw(st.dictionaries(st.integers(0, 2), st.integers(0, 20), max_size=2)),
                "fails_after": draw(st.sampled_from([None] * 5 + [0, 3])),
                "priority": draw(st.sampled_from([0, 1, 2, 2, URGENT_PRIORITY])),
                "salt": draw(st.sampled_from([b"", b"a", b"b"])),
                "ignore_eos": draw(st.booleans()),
                "adapter": draw(st.sampled_from([0, 0, 1, 2, 3, 4])),
                "forks": draw(st.sampled_from([0, 0, 0, 1, 3])),
                "draft": draw(st.sampled_from([0, 0, 3, 16])),
                "logprobs": draw(st.sampled_from([-1, -1, 0])),
                "prompt_logprobs": draw(st.sampled_from([-1, -1, -1, 0])),
            }
        )
    return jobs


@st.composite
def disturbances(draw: st.DrawFn) -> dict[int, tuple]:
    """Draw the disturbances by the step before which they happen."""
    job = st.integers(0, 11)
    kinds = st.one_of(
        st.tuples(st.just("pin"), job, st.integers(-1, 60)),
        st.tuples(st.just("transfer"), job),
        st.tuples(st.just("break")),
        st.tuples(st.just("drop"), st.integers(1, 4)),
    )
    return draw(st.dictionaries(st.integers(1, 60), kinds, max_size=6))


class Run:
    """Runs the sequences of a workload on one engine, and checks invariants after every step."""

    def __init__(self, engine: ScheduledEngine, jobs: list[dict]) -> None:
        self.engine = engine
        self.backend = engine._backend
        self.jobs = {job["key"] + 100 * i: job for job in jobs for i in range(1 + job["forks"])}
        self.coming = sorted(jobs, key=lambda job: job["arrives"])
        self.tokens: dict[int, list[int]] = {key: [] for key in self.jobs}
        self.logprobs: dict[int, list[float]] = {key: [] for key in self.jobs}
        self.prompt_logprobs: dict[int, list[float]] = {key: [] for key in self.jobs}
        self.ended: dict[int, Finish] = {}
        self.admitted: Counter[int] = Counter()
        self.index: set[bytes] = set()
        self.steps = 0

    @property
    def is_over(self) -> bool:
        return not self.coming and not self.engine.has_work

    def step(self) -> None:
        self.steps += 1
        assert self.steps < STEPS_MAX, self.engine.load()
        while self.coming and self.coming[0]["arrives"] <= self.steps:
            self.add(self.coming.pop(0))
        for key, job in self.jobs.items():
            if job not in self.coming and job["cancels"].get(key // 100) == len(self.tokens[key]):
                self.engine.cancel(key)
            if key < 100 and job["fails_after"] == len(self.tokens[key]):
                self.backend.failing[key] = "its grammar is stuck"
        self.engine._clock.sleep(1.0)
        self.note(self.engine.step())
        self.backend.is_broken = False
        self.check()

    def add(self, job: dict) -> None:
        digest = digest_of(job["adapter"])
        if digest:
            self.engine.put_adapter(digest, self.engine.read_adapter(digest, None))
        key = job["key"]
        self.engine.add(
            SequenceRequest(
                key,
                job["prompt"],
                job["count"],
                sampling=Sampling(seed=key, logprobs=job["logprobs"]),
                priority=job["priority"],
                cache_root=root_of(job),
                adapter_digest=digest,
                ignore_eos=job["ignore_eos"],
                forks=tuple(Fork(key + 100 * i, key + 100 * i) for i in range(1, 1 + job["forks"])),
                prompt_logprobs=job["prompt_logprobs"],
                draft_tokens_max=job["draft"],
            )
        )

    def note(self, events: StepEvents) -> None:
        assert events.has_runs or len(set(events.keys)) == len(events.keys)
        self.admitted.update(event.key for event in events.admitted)
        for part in events.prompt_logprobs:
            assert not self.tokens[part.key]
            assert part.first == 1 + len(self.prompt_logprobs[part.key])
            self.prompt_logprobs[part.key] += [entry.logprob for entry in part.tokens]
        for key, token in zip(events.keys, events.tokens, strict=True):
            assert key not in self.ended
            assert self.admitted[key] == 1
            self.tokens[key].append(token)
        wanted = [key for key in events.keys if self.jobs[key]["logprobs"] >= 0]
        assert [entry.key for entry in events.logprobs] == wanted
        for entry in events.logprobs:
            self.logprobs[entry.key].append(entry.logprob)
        for event in events.finished:
            assert event.key not in self.ended
            self.ended[event.key] = event.reason
            assert event.output_tokens == len(self.tokens[event.key])
        self.index |= {key for key, is_cached in events.kv.items() if is_cached}
        self.index -= {key for key, is_cached in events.kv.items() if not is_cached}

    def check(self) -> None:
        scheduler, load = self.engine.scheduler, self.engine.load()
        assert self.index == set(self.engine.cached_blocks())
        scheduler.pool.check()
        scheduler.adapters.check()
        roots: dict[int, bytes] = {}
        adapters = set()
        for sequence in scheduler._living.values():
            for index, block in enumerate(sequence.blocks):
                assert roots.setdefault(block, sequence.root) == sequence.root
                is_full = (index + 1) * BLOCK_TOKENS <= sequence.computed
                assert is_full or scheduler.pool._run_of[block] is None
            if sequence.blocks:
                adapters.add(sequence.request.adapter_digest)
        assert adapters - {""} <= set(load.adapters_resident)
        assert len(load.adapters_resident) <= SLOTS
        assert load.kv_blocks_used == scheduler.pool.used == len(roots)
        urgent = sum(job["priority"] == URGENT_PRIORITY for job in self.jobs.values())
        assert load.running <= self.engine.limits.sequences_max + urgent
        assert load.running + load.waiting == len(scheduler._living)


def disturb(runs: list[Run], jobs: list[dict], kind: str, *values: int) -> None:
    for run, other in (runs, runs[::-1]):
        if kind == "break":
            run.backend.is_broken = True
        elif kind == "drop":
            run.engine.drop_adapter(digest_of(values[0]))
        else:
            job = jobs[values[0] % len(jobs)]
            prompt = job["prompt"]
            hashes = block_hashes(prompt, root_of(job), len(prompt) // BLOCK_TOKENS)
            cached = run.engine.scheduler.pool.find(hashes)
            if kind == "transfer":
                blocks = run.engine.export_blocks(hashes)
                assert len(blocks.hashes) == len(cached)
                taken = other.engine.import_blocks(blocks)
                assert taken == len(other.engine.scheduler.pool.find(list(blocks.hashes)))
            else:
                now_s = run.engine._clock()
                pinned = run.engine.scheduler.pool.pin(hashes, now_s + values[1], now_s)
                assert pinned <= (len(cached) if values[1] > 0 else 0)
                assert run.engine.load().kv_blocks_pinned <= run.engine.limits.kv_blocks // 2


@settings(max_examples=100)
@given(
    jobs=workloads(),
    disturbances=disturbances(),
    blocks=st.integers(9, 30),
    sequences=st.integers(1, 6),
    extra=st.integers(0, 90),
    prefix_cache=st.sampled_from([True, True, True, False]),
)
def test_any_workload_ends_once_with_the_right_tokens(
    make_engine,
    expected_output,
    expected_logprobs,
    jobs,
    disturbances,
    blocks,
    sequences,
    extra,
    prefix_cache,
) -> None:
    runs = [
        Run(
            make_engine(
                blocks=blocks,
                sequences=sequences,
                step_tokens=sequences + extra,
                slots=SLOTS,
                prefix_cache=prefix_cache,
            ),
            [job for job in jobs if job["engine"] == number],
        )
        for number in range(2)
    ]
    step = 0
    while not all(run.is_over for run in runs):
        step += 1
        kind, *values = disturbances.get(step, ("",))
        if kind and (prefix_cache or kind != "transfer"):
            disturb(runs, jobs, kind, *values)
        for run in runs:
            run.step()
    for run in runs:
        check_answers(run, expected_output, expected_logprobs)
        load = run.engine.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)
        assert load.prefill_tokens_owed == 0
        assert sum(state.sequences for state in run.engine.adapters()) == 0


def check_answers(run: Run, expected_output, expected_logprobs) -> None:
    assert run.ended.keys() == run.jobs.keys()
    assert max(run.admitted.values(), default=1) == 1
    for key, job in run.jobs.items():
        prompt, got, adapter = job["prompt"], run.tokens[key], job["adapter"]
        stop = frozenset() if job["ignore_eos"] else EOS
        wanted = expected_output(prompt, job["count"], stop=stop, adapter=adapter, seed=key)
        if run.ended[key] in (Finish.CANCELLED, Finish.FAILED):
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
            assert run.ended[key] is (Finish.STOP if got[-1] in stop else Finish.LENGTH)
        if job["logprobs"] >= 0:
            whole = expected_logprobs(prompt + got, len(prompt), adapter)
            assert run.logprobs[key] == whole
        reported = run.prompt_logprobs[key]
        whole = expected_logprobs(prompt, 1, adapter)
        assert reported == whole[: len(reported)]
        if job["prompt_logprobs"] >= 0 and key < 100 and got:
            assert len(reported) == len(whole)
        assert job["prompt_logprobs"] >= 0 or not reported
