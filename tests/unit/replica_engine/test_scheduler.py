import pytest

from replica.engine.types import URGENT_PRIORITY, Finish, Limits, SequenceRequest, StepEvents
from sluice.hashing import BLOCK_TOKENS

EOS = frozenset({7})


def request(key: int, prompt: list[int], count: int = 5, **options) -> SequenceRequest:
    return SequenceRequest(key, prompt, count, **options)


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
    for _ in range(6):  # a decoding row leaves 31 tokens per step, so 200 tokens need 7 steps
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
    for _ in range(3):  # a full step still has 16 tokens for prompts
        assert 9 not in tokens
        tokens += engine.step().keys
    assert 9 in tokens
    assert engine.load().preemptions == 1
    out = run_to_end(engine)
    for key in (2, 3):
        assert out[key] == expected_output([key] * 100, 20, stop=frozenset())


def test_admission_leaves_room_to_running_requests(make_engine) -> None:
    engine = make_engine(blocks=4, sequences=4, step_tokens=128)
    engine.add(request(1, [1] * 60, 30, ignore_eos=True))
    engine.step()
    engine.add(request(2, [2] * 60, 2))  # two blocks are free, but the watermark reserves one
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
    engine._backend.is_broken = True
    events = engine.step()
    assert [(e.key, e.reason, e.code) for e in events.finished] == [
        (1, Finish.FAILED, "engine_failed")
    ]
    assert "out of luck" in events.finished[0].message
    engine._backend.is_broken = False
    assert set(run_to_end(engine)) == {2}
    assert engine.load().kv_blocks_used == 0


def test_a_step_for_which_there_is_no_memory_fails_alone(
    make_engine, run_to_end, monkeypatch
) -> None:
    engine = make_engine()
    engine.add(request(1, [1, 2, 3]))

    def run(plan) -> None:
        raise MemoryError("Unable to allocate 2 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(engine._backend, "run", run)
        (event,) = engine.step().finished
    assert (event.key, event.reason, event.code) == (1, Finish.FAILED, "engine_failed")
    assert "a step of 3 tokens: Unable to allocate 2 GiB" in event.message
    engine.add(request(2, [1, 2, 3]))
    assert set(run_to_end(engine)) == {2}


@pytest.mark.parametrize(
    ("is_refused", "reason", "code", "param"),
    [
        (False, Finish.FAILED, "engine_failed", ""),
        (True, Finish.REFUSED, "invalid_request", "grammar"),
    ],
)
def test_a_sequence_that_would_fail_anywhere_is_refused(
    make_engine, run_to_end, is_refused: bool, reason: Finish, code: str, param: str
) -> None:
    engine = make_engine()
    engine.add(request(1, [1, 2, 3]))
    engine.step()
    engine._backend.failing[1] = "its grammar is stuck"
    engine._backend.blames_requests = is_refused
    (event,) = engine.step().finished
    assert (event.reason, event.code, event.message) == (reason, code, "its grammar is stuck")
    assert event.param == param
    assert event.output_tokens == 1
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


def test_limits_under_which_an_engine_could_stand_still_are_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens_max"):
        Limits(100, 8, 4, 10, 100)


def test_the_load_reports_the_prompt_tokens_of_the_last_step(make_engine) -> None:
    engine = make_engine(step_tokens=64)
    engine.add(SequenceRequest(1, [5] * 80, 8))
    engine.step()
    assert (engine.load().prefilling, engine.load().step_prompt_tokens) == (1, 64)
    engine.step()
    assert (engine.load().prefilling, engine.load().step_prompt_tokens) == (0, 16)
    engine.step()
    assert engine.load().step_prompt_tokens == 0
