import pytest

from replica.engine.core import ScheduledEngine
from replica.engine.types import Finish, Fork, Sampling, SequenceRequest
from sluice.hashing import BLOCK_TOKENS

SEEDS = {1: 11, 2: 22, 3: 33, 4: 44}


def group(prompt: list[int], count: int = 20, *, n: int = 4, **options) -> SequenceRequest:
    """Return a request with the keys 1 .. n, each with a seed."""
    forks = tuple(Fork(key, SEEDS[key]) for key in range(2, n + 1))
    values = {"sampling": Sampling(seed=SEEDS[1]), "ignore_eos": True, **options}
    return SequenceRequest(1, prompt, count, forks=forks, **values)


class Note:
    """Collects the events of steps."""

    def __init__(self) -> None:
        self.admitted: dict[int, int] = {}
        self.ended: dict[int, Finish] = {}
        self.prompts: dict[int, int] = {}
        self.first_step: dict[int, int] = {}
        self.steps = 0

    def __call__(self, events) -> None:
        self.steps += 1
        self.admitted.update({event.key: event.cached_tokens for event in events.admitted})
        self.ended.update({event.key: event.reason for event in events.finished})
        for part in events.prompt_logprobs:
            self.prompts[part.key] = self.prompts.get(part.key, 0) + len(part.tokens)
        for key in events.keys:
            self.first_step.setdefault(key, self.steps)


def prefill_tokens(engine: ScheduledEngine) -> int:
    return sum(count for plan in engine._backend.plans for _, count in plan.prefill)


@pytest.fixture
def wanted(expected_output):
    def tokens(prompt: list[int], keys, count: int = 20) -> dict[int, list[int]]:
        return {k: expected_output(prompt, count, stop=frozenset(), seed=SEEDS[k]) for k in keys}

    return tokens


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [5, 64, 70])
def test_a_prompt_is_computed_once_for_all_its_forks(
    make_engine, run_to_end, wanted, length, prefix_cache
) -> None:
    engine = make_engine(prefix_cache=prefix_cache, step_tokens=32)
    prompt = [i % 9 for i in range(length)]
    engine.add(group(prompt))
    note = Note()
    assert engine.load().waiting == 4
    assert run_to_end(engine, note) == wanted(prompt, range(1, 5))
    assert prefill_tokens(engine) == length
    assert note.admitted == {1: 0, 2: length, 3: length, 4: length}
    assert len(set(note.first_step.values())) == 1
    assert set(note.ended.values()) == {Finish.LENGTH}
    assert (engine.load().prompt_tokens, engine.load().cached_tokens) == (4 * length, 3 * length)


def test_forks_share_full_blocks_and_have_the_unfinished_one_to_themselves(make_engine) -> None:
    engine = make_engine(step_tokens=128)
    engine.add(group([1] * 70))
    engine.step()
    plan = engine._backend.plans[0]
    assert [sequence.request.key for sequence in plan.sampled] == [1, 2, 3, 4]
    assert plan.fork_of == {1: 0, 2: 0, 3: 0}
    leader, *forks = plan.sampled
    assert plan.copies == [(leader.blocks[2], fork.blocks[2]) for fork in forks]
    assert {tuple(fork.blocks[:2]) for fork in forks} == {tuple(leader.blocks[:2])}
    assert engine.load().kv_blocks_used == 2 + 4
    assert (engine.load().running, engine.load().waiting) == (4, 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_forks_for_which_there_is_no_seat_come_later(
    make_engine, run_to_end, wanted, prefix_cache
) -> None:
    engine = make_engine(sequences=2, prefix_cache=prefix_cache, step_tokens=128)
    prompt = [i % 50 for i in range(70)]
    engine.add(group(prompt))
    note = Note()
    assert run_to_end(engine, note) == wanted(prompt, range(1, 5))
    # The third sibling leads the fourth, so the prompt is computed at most twice.
    assert prefill_tokens(engine) == (70 + 70 - 64 if prefix_cache else 2 * 70)
    assert note.admitted == {1: 0, 2: 70, 3: 64 if prefix_cache else 0, 4: 70}


def test_forks_for_which_there_is_no_block_come_later(make_engine, run_to_end, wanted) -> None:
    engine = make_engine(blocks=5)
    prompt = [i % 50 for i in range(70)]
    engine.add(group(prompt, 60))
    note = Note()
    assert run_to_end(engine, note) == wanted(prompt, range(1, 5), 60)
    assert note.ended.keys() == {1, 2, 3, 4}
    assert engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_siblings_live_on_when_their_leader_is_cancelled(
    make_engine, run_to_end, wanted, steps, prefix_cache
) -> None:
    """The leader is cancelled while it waits, during its prompt, and after the fork."""
    engine = make_engine(step_tokens=32, prefix_cache=prefix_cache)
    prompt = [i % 50 for i in range(70)]
    engine.add(group(prompt))
    for _ in range(steps):
        engine.step()
    emitted = max(0, steps - 2)  # the prompt takes three steps, and the last of them has a token
    engine.cancel(1)
    note = Note()
    tokens = run_to_end(engine, note)
    assert note.ended == {1: Finish.CANCELLED} | dict.fromkeys((2, 3, 4), Finish.LENGTH)
    assert tokens == {k: v[emitted:] for k, v in wanted(prompt, (2, 3, 4)).items()}
    assert engine.load().kv_blocks_used == 0


def test_a_sibling_that_is_cancelled_before_the_fork_never_runs(
    make_engine, run_to_end, wanted
) -> None:
    engine = make_engine(step_tokens=32)
    prompt = [1, 2, 3] * 20
    engine.add(group(prompt))
    engine.step()
    engine.cancel(3)
    assert engine.load().waiting == 2
    note = Note()
    assert run_to_end(engine, note) == wanted(prompt, (1, 2, 4))
    assert note.ended[3] is Finish.CANCELLED
    assert 3 not in note.admitted


def test_the_prompts_logprobs_are_reported_once_by_the_computing_fork(
    make_engine, run_to_end
) -> None:
    engine = make_engine(step_tokens=32)
    engine.add(group([1, 2, 3] * 20, prompt_logprobs=0))
    note = Note()
    engine.step()
    engine.cancel(1)
    run_to_end(engine, note)
    assert note.prompts == {2: 59}


def test_a_failed_step_takes_the_forks_that_joined_in_it_and_no_others(
    make_engine, run_to_end, wanted
) -> None:
    engine = make_engine(sequences=2, step_tokens=128)
    prompt = list(range(40))
    engine.add(group(prompt))
    engine._backend.is_broken = True
    note = Note()
    note(engine.step())
    assert note.ended == {1: Finish.FAILED, 2: Finish.FAILED}
    engine._backend.is_broken = False
    assert run_to_end(engine, note) == wanted(prompt, (3, 4))


def test_a_sequence_that_cannot_go_on_fails_alone(make_engine, run_to_end, wanted) -> None:
    engine = make_engine()
    prompt = [1, 2, 3, 4]
    engine.add(group(prompt))
    engine._backend.failing = {1: "its grammar is stuck"}
    note = Note()
    ended = []
    assert run_to_end(engine, lambda e: (note(e), ended.extend(e.finished))) == wanted(
        prompt, (2, 3, 4)
    )
    failed = next(event for event in ended if event.key == 1)
    assert (failed.code, failed.message) == ("engine_failed", "its grammar is stuck")
    assert (failed.output_tokens, failed.prefill_s) == (0, 0.0)
    assert engine.load().kv_blocks_used == 0


def test_preempted_forks_are_computed_again_like_others(make_engine, run_to_end, wanted) -> None:
    engine = make_engine(blocks=8)
    prompt = [9] * (2 * BLOCK_TOKENS)
    engine.add(group(prompt, 100))
    assert run_to_end(engine) == wanted(prompt, range(1, 5), 100)
    assert engine.load().preemptions > 0
