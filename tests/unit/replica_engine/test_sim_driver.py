from pathlib import Path

import pytest

from replica.drivers.options import OptionsError, parse_options
from replica.drivers.registry import load_driver
from replica.drivers.sim import SimOptions, load_sim
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.types import Fork, Sampling, SequenceRequest


@pytest.fixture
def make_sim(model_dir: Path, clock):
    def make(**options):
        return load_sim(model_dir, "base", options, clock=clock, sleep=clock.sleep)

    return make


def test_output_is_ordinary_deterministic_and_goes_on_after_a_resume(make_sim, run_to_end) -> None:
    def generate(prompt: list[int], count: int) -> list[int]:
        engine = make_sim()
        engine.add(SequenceRequest(1, prompt, count))
        return run_to_end(engine)[1]

    prompt = [5, 6, 7]
    whole = generate(prompt, 40)
    assert whole == generate(prompt, 40)
    assert whole[15:] == generate(prompt + whole[:15], 25)
    assert generate([5, 6, 8], 40) != whole
    assert len(set(whole)) > 20
    assert not {0, 1, 2} & set(whole)


def test_a_seed_makes_another_answer_that_goes_on_after_a_resume(make_sim, run_to_end) -> None:
    def generate(prompt: list[int], count: int, seed: int, *, resumed: int = 0) -> list[int]:
        engine = make_sim()
        sampling = Sampling(temperature=1.0, seed=seed)
        request = SequenceRequest(1, prompt, count, sampling=sampling, resumed_tokens=resumed)
        engine.add(request)
        return run_to_end(engine)[1]

    whole = generate([5, 6], 30, seed=1)
    assert whole == generate([5, 6], 30, seed=1)
    other = generate([5, 6], 30, seed=2)
    assert all(a != b for a, b in zip(whole[:3], other[:3], strict=True))
    # A replica that resumes the sequence does not need the seed.
    assert generate([5, 6, *whole[:9]], 21, seed=7, resumed=9) == whole[9:]


def test_adapters_take_their_time_from_disk_and_into_a_slot(make_sim, run_to_end, clock, tmp_path):
    engine = make_sim(
        cost_step_s=1.0,
        cost_decode_row_s=0,
        cost_prefill_token_s=0,
        cost_context_token_s=0,
        adapter_read_s=3.0,
        adapter_load_s=0.25,
    )
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    began_s = clock.now_s
    adapter = engine.read_adapter("one", tmp_path)
    assert clock.now_s - began_s == 3.0
    assert (adapter.rank, adapter.memory_bytes) == (16, 132_000_000)
    engine.put_adapter("one", adapter)
    for expected_s in (2.25, 2.0):  # the adapter stays in its slot after the first step
        began_s = clock.now_s
        engine.add(SequenceRequest(1, [5], 2, adapter_digest="one"))
        run_to_end(engine)
        assert clock.now_s - began_s == expected_s


def test_a_draft_is_accepted_as_far_as_it_is_right(make_sim, run_to_end) -> None:
    engine = make_sim()
    engine.add(SequenceRequest(1, [5, 6], 12))
    coming = run_to_end(engine)[1]
    backend = engine._backend
    for right in range(5):
        sequence = ScheduledSequence(SequenceRequest(2, [5, 6], 12), 1, b"", frozenset())
        first = backend.run(StepPlan([], [(sequence, 2)])).tokens
        sequence.computed, sequence.tokens = 2, [5, 6, *first]
        plan = StepPlan([sequence], [])
        wrong = (coming[1 + right] + 1) % 400
        plan.drafts = {0: [*coming[1 : 1 + right], wrong, 9]}
        output = backend.run(plan)
        assert [*output.tokens, *output.more.get(0, [])] == coming[1 : 2 + right]
        # The next tokens follow the accepted tokens.
        sequence.tokens.extend(coming[1 : 2 + right])
        sequence.computed = len(sequence.tokens) - 1
        assert backend.run(StepPlan([sequence], [])).tokens == [coming[2 + right]]


def test_preemption_does_not_change_the_output(make_sim, run_to_end) -> None:
    def generate(**options) -> tuple[dict[int, list[int]], int]:
        engine = make_sim(**options)
        for key in range(6):
            sampling = Sampling(temperature=key % 2, seed=key)
            forks = (Fork(100 + key, 9),)
            prompt = [key + 10] * 40
            engine.add(SequenceRequest(key, prompt, 100, sampling=sampling, forks=forks))
        return run_to_end(engine), engine.load().preemptions

    free, _ = generate()
    squeezed, preemptions = generate(blocks=12)
    assert preemptions > 0
    assert squeezed == free


def test_a_thousand_sequences_make_more_than_100k_tokens_per_second(
    make_sim, run_to_end, clock
) -> None:
    engine = make_sim()
    for key in range(1000):
        engine.add(SequenceRequest(key, [key % 400] * 64, 100))
    began_s = clock.now_s
    tokens = run_to_end(engine)
    decoded = sum(map(len, tokens.values()))
    assert decoded == 100_000
    assert decoded / (clock.now_s - began_s) > 100_000


def test_a_run_takes_the_time_of_the_cost_model(make_sim, run_to_end, clock) -> None:
    engine = make_sim(
        cost_step_s=0.5,
        cost_decode_row_s=0.25,
        cost_prefill_token_s=0.125,
        cost_context_token_s=0.0,
    )
    engine.add(SequenceRequest(1, [9] * 4, 3))
    began_s = clock.now_s
    run_to_end(engine)
    assert clock.now_s - began_s == 0.5 + 4 * 0.125 + 2 * (0.5 + 0.25)


def test_a_faster_engine_is_faster(make_sim, run_to_end, clock) -> None:
    engine = make_sim(speed=4.0, cost_step_s=1.0, cost_decode_row_s=0, cost_prefill_token_s=0)
    engine.add(SequenceRequest(1, [9], 1))
    began_s = clock.now_s
    run_to_end(engine)
    assert clock.now_s - began_s == 0.25


def test_an_engine_without_artifact_serves_any_base(clock, run_to_end) -> None:
    engine = load_sim(None, "base", {}, clock=clock, sleep=clock.sleep)
    engine.add(SequenceRequest(1, [31_999], 5))
    assert len(run_to_end(engine)[1]) == 5


def test_options_may_be_text_and_mistakes_are_named() -> None:
    options = parse_options(
        SimOptions, {"blocks": "12", "speed": 2, "prefix_cache": "false", "cost_step_s": "1e-3"}
    )
    assert (options.blocks, options.speed, options.prefix_cache) == (12, 2.0, False)
    assert options.cost_step_s == 1e-3
    for given in ({"blocks": "many"}, {"blocks": 1.5}, {"prefix_cache": "maybe"}, {"speed": None}):
        (name,) = given
        with pytest.raises(OptionsError, match=f"engine option {name} is"):
            parse_options(SimOptions, given)
    with pytest.raises(OptionsError, match="unknown engine option block_count; known are blocks"):
        parse_options(SimOptions, {"block_count": 1})


def test_unknown_engines_are_named() -> None:
    with pytest.raises(ValueError, match="unknown engine 'gpu'; known are openvino, sim, trtllm"):
        load_driver("gpu", None, "base", {})
    with pytest.raises(ValueError, match="needs a base artifact"):
        load_driver("openvino", None, "base", {})


def test_idle_time_is_no_part_of_a_step(make_sim, run_to_end, clock) -> None:
    engine = make_sim(cost_step_s=1.0)
    took_s: list[float] = []
    for key in (1, 2):
        engine.add(SequenceRequest(key, [5], 1))
        run_to_end(engine)
        took_s.append(engine.load().step_s)
        clock.sleep(100.0)  # without work
    assert took_s[1] == pytest.approx(took_s[0]) == pytest.approx(1.0, abs=0.1)
