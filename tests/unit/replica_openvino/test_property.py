"""Compares random work under pressure with an engine that has neither cache nor pressure.

The work has shared prefixes, evictions, preemptions, chunks of prompts, adapters, forks, drafts
with mistakes, cancels, and one graph or two. SLUICE_PROPERTY_SEEDS=50 tries 50 seeds.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from replica.engine.speculation import PromptLookup
from replica.engine.types import Finish, Fork, Sampling, SequenceRequest

SEEDS = range(1, 1 + int(os.environ.get("SLUICE_PROPERTY_SEEDS", "2")))
JOBS = 80
FORK_KEYS = 1000  # the forks of request k have the keys 1000 * k + 1, ...
PRESSURE = {
    "blocks": 32,
    "step_tokens_max": 48,
    "sequences_max": 12,
    "adapter_slots": 3,
}
CALM = {"blocks": 4000, "step_tokens_max": 2048, "sequences_max": 512, "prefix_cache": False}


@dataclass(frozen=True)
class Job:
    request: SequenceRequest
    cancel_after: int | None  # number of tokens


def make_jobs(rnd: random.Random, adapters: list[str], make_request) -> list[Job]:
    prefixes = [[rnd.randrange(3, 470) for _ in range(n)] for n in (40, 100, 200, 333)]
    jobs = []
    for key in range(1, JOBS + 1):
        prompt = rnd.choice(prefixes)[: rnd.randint(1, 333)]
        prompt = prompt + [rnd.randrange(3, 470) for _ in range(rnd.randint(1, 50))]
        forks = [rnd.randrange(1 << 32) for _ in range(rnd.choice([0, 0, 0, 0, 1, 3]))]
        request = make_request(
            key * FORK_KEYS,
            prompt,
            rnd.randint(1, 40),
            rnd.choice(["", "", *adapters]),
            sampling=Sampling(temperature=rnd.choice([0.0, 1.0]), seed=rnd.randrange(1 << 32)),
            priority=rnd.randint(0, 2),
            forks=tuple(Fork(key * FORK_KEYS + index, seed) for index, seed in enumerate(forks, 1)),
            draft_tokens_max=rnd.choice([0, 0, 3, 8]),
        )
        jobs.append(Job(request, rnd.randint(0, 10) if rnd.random() < 0.15 else None))
    return jobs


def calm_answers(engine, jobs: list[Job], run_all) -> dict[int, list[int]]:
    """Compute every sequence alone, without forks, drafts, cache and preemptions."""
    requests = []
    for job in jobs:
        request = replace(job.request, forks=(), draft_tokens_max=0, priority=0)
        requests.append(request)
        requests += [
            replace(request, key=fork.key, sampling=replace(request.sampling, seed=fork.seed))
            for fork in job.request.forks
        ]
    answers = run_all(engine, *requests).tokens
    assert engine.load().preemptions == engine.load().cached_tokens == 0
    return answers


def foresee(answers: dict[int, list[int]], jobs: list[Job], rnd: random.Random):
    """Return a `propose` that drafts the answers, with mistakes."""
    whole: dict[tuple[int, ...], list[list[int]]] = {}
    for job in jobs:
        prompt = list(job.request.prompt)
        for key in (job.request.key, *(fork.key for fork in job.request.forks)):
            whole.setdefault(tuple(prompt), []).append(prompt + answers[key])

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        for prompt, candidates in whole.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                for known in candidates:
                    if known[: len(tokens)] == list(tokens):
                        draft = known[len(tokens) : len(tokens) + min(count_max, self.width)]
                        return [token if rnd.random() < 0.8 else 3 for token in draft]
        return []

    return propose


@pytest.mark.parametrize("seed", SEEDS)
def test_pressure_does_not_change_any_answer(
    load, adapter_dirs, make_request, run_all, monkeypatch, seed: int
) -> None:
    rnd = random.Random(seed)
    jobs = make_jobs(rnd, list(adapter_dirs), make_request)
    wanted = calm_answers(load(*adapter_dirs, **CALM), jobs, run_all)
    monkeypatch.setattr(PromptLookup, "propose", foresee(wanted, jobs, rnd))

    engine = load(*adapter_dirs, base_graph="on" if seed % 2 else "off", **PRESSURE)
    scheduler = engine.scheduler
    todo = list(jobs)
    tokens: dict[int, list[int]] = {key: [] for key in wanted}
    ended: Counter[int] = Counter()
    reasons: dict[int, Finish] = {}
    cancelled = {job.request.key: job.cancel_after for job in jobs}
    steps = 0
    while todo or engine.has_work:
        steps += 1
        assert steps < 20_000, engine.load()
        if todo and rnd.random() < 0.5:
            engine.add(todo.pop(0).request)
        events = engine.step()
        for key, token in zip(events.keys, events.tokens, strict=True):
            assert not ended[key]
            tokens[key].append(token)
        for event in events.finished:
            ended[event.key] += 1
            reasons[event.key] = event.reason
        for key, after in cancelled.items():
            if after is not None and len(tokens[key]) >= max(after, 1) and not ended[key]:
                engine.cancel(key)
        scheduler.pool.check()
        scheduler.adapters.check()

    assert ended == Counter(wanted.keys())
    for key, answer in wanted.items():
        if reasons[key] is Finish.CANCELLED:
            assert tokens[key] == answer[: len(tokens[key])], key
        else:
            assert reasons[key] is Finish.LENGTH
            assert tokens[key] == answer, key

    load_now = engine.load()
    assert load_now.kv_blocks_used == 0
    assert load_now.preemptions > 0
    assert load_now.cached_tokens > 0
    assert load_now.accepted_tokens > 0
    assert load_now.draft_tokens > load_now.accepted_tokens
    assert scheduler.pool.evictions > 0
    assert Finish.CANCELLED in reasons.values()
    assert max(state.loads for state in engine.adapters()) > 1
