import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.drivers.options import OptionsError, parse_options
from replica.drivers.sim import SimOptions, choose_cost, load_sim
from replica.drivers.sim_costs import GPUS, MODELS, MODELS_BY_NAME, StepWork
from replica.engine.types import SequenceRequest


def prefill_s(name: str, tokens: int, step_tokens: int = 2048) -> float:
    """Return the seconds to compute one prompt alone, in chunks."""
    total_s = 0.0
    for before in range(0, tokens, step_tokens):
        chunk = min(step_tokens, tokens - before)
        work = StepWork(chunk, chunk * (before + chunk / 2), before)
        total_s += MODELS_BY_NAME[name].step_s(work)
    return total_s


# Times of the routing study's own simulator, for prompts that are computed alone.
@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [("h70", {1000: 63, 8000: 440, 32_000: 1921}), ("m8", {1000: 32, 8000: 214, 32_000: 1181})],
)
def test_the_published_fits_give_the_published_times(name, expected_ms) -> None:
    for tokens, expected in expected_ms.items():
        assert prefill_s(name, tokens) * 1e3 == pytest.approx(expected, rel=0.02)


def test_m8_is_the_polynomial_of_a_whole_prompt_and_of_a_pure_decode_step() -> None:
    model = MODELS_BY_NAME["m8"]
    whole = StepWork(prefill_tokens=2000, prefill_pairs=2000 * 1000)
    expected_ms = 16.50142 + 0.01518344 * 2000 + 4.209989e-7 * 2000**2
    assert model.step_s(whole) * 1e3 == pytest.approx(expected_ms)
    half_full = StepWork(decode_tokens=64, decode_context=1_048_576 // 2)
    assert model.step_s(half_full) * 1e3 == pytest.approx(5.74 + 54.01 * 0.5 - 25.74 * 0.25)


def test_sizes_equal_the_sizes_of_the_study() -> None:
    assert MODELS_BY_NAME["h70"].size.blocks * 32 == 448_000
    assert MODELS_BY_NAME["m8"].size.blocks * 32 == 1_048_576
    assert {model.size.step_tokens_max for model in MODELS_BY_NAME.values()} == {2048}


def test_the_estimate_of_h70s_own_machine_is_within_a_factor_of_two_of_the_fit() -> None:
    for work in (
        StepWork(prefill_tokens=2048, prefill_pairs=2048 * 1024),
        StepWork(decode_tokens=64, decode_context=128_000),
        StepWork(decode_tokens=1, decode_context=1000),
    ):
        ratio = MODELS_BY_NAME["h100-70b"].step_s(work) / MODELS_BY_NAME["h70"].step_s(work)
        assert 0.5 < ratio < 2


def test_newer_gpus_are_faster_and_all_hold_their_models() -> None:
    decode = StepWork(decode_tokens=64, decode_context=128_000)
    for shape in MODELS:
        for work in (decode, StepWork(prefill_tokens=2048, prefill_pairs=2048 * 1024)):
            # Costs are compared per GPU, because a newer kind may need fewer GPUs per replica.
            costs = [
                MODELS_BY_NAME[f"{gpu}-{shape}"].step_s(work)
                * MODELS_BY_NAME[f"{gpu}-{shape}"].gpus
                for gpu in GPUS
            ]
            assert costs == sorted(costs, reverse=True)
        for gpu in GPUS:
            assert MODELS_BY_NAME[f"{gpu}-{shape}"].size.blocks * 32 > 128_000


counts = st.integers(0, 4096)


@given(st.sampled_from(sorted(MODELS_BY_NAME)), counts, counts, counts, st.integers(0, 400_000))
def test_more_work_never_takes_less_time(name, prefill, more, decode, context) -> None:
    model = MODELS_BY_NAME[name]
    less_s = model.step_s(StepWork(prefill, prefill**2 / 2, 0, decode, context))
    more_s = model.step_s(StepWork(prefill + more, (prefill + more) ** 2 / 2, 0, decode, context))
    assert 0 < less_s <= more_s < math.inf
    longer = StepWork(prefill, prefill**2 / 2, 0, decode, context + more)
    assert model.step_s(longer) >= less_s * (1 - 1e-12)


def test_an_engine_takes_size_and_time_from_its_model_unless_told_otherwise(clock) -> None:
    engine = load_sim(None, "base", {"cost": "h70"}, clock=clock, sleep=clock.sleep)
    assert (engine.limits.kv_blocks, engine.limits.step_tokens_max) == (14_000, 2048)
    assert engine.limits.sequences_max == 256
    began_s = clock.now_s
    engine.add(SequenceRequest(1, [5] * 1000, 1))
    while engine.has_work:
        engine.step()
    assert clock.now_s - began_s == pytest.approx(0.063, rel=0.02)
    options = {"cost": "m8", "blocks": 7, "sequences_max": 3, "step_tokens_max": 64}
    limits = load_sim(None, "base", options).limits
    assert (limits.kv_blocks, limits.sequences_max, limits.step_tokens_max) == (7, 3, 64)


def test_wrong_names_and_constants_of_another_model_are_refused() -> None:
    with pytest.raises(OptionsError, match="cost is 'h90'; known are custom, h70, m8, a100-8b"):
        load_sim(None, "base", {"cost": "h90"})
    with pytest.raises(OptionsError, match="cost_step_s needs cost=custom"):
        choose_cost(parse_options(SimOptions, {"cost": "m8", "cost_step_s": 1}))
    for options in ({"speed": 0}, {"noise": 2}):
        with pytest.raises(OptionsError, match=r"must be above 0, noise .* in 0\.\.1"):
            load_sim(None, "base", options)


def test_noise_is_the_same_for_a_seed_and_does_not_change_the_mean(clock) -> None:
    def durations(seed: int) -> list[float]:
        engine = load_sim(
            None,
            "base",
            {"noise": 0.3, "seed": seed, "cost_context_token_s": 0},
            clock=clock,
            sleep=clock.sleep,
        )
        engine.add(SequenceRequest(1, [5], 1500))
        times = [clock.now_s]
        while engine.has_work:
            engine.step()
            times.append(clock.now_s)
        return [b - a for a, b in pairwise(times[1:])]

    one, same, other = durations(1), durations(1), durations(2)
    assert one == pytest.approx(same, rel=1e-6)
    assert one != pytest.approx(other, rel=1e-6)
    mean_s = sum(one) / len(one)
    assert mean_s == pytest.approx(2.002e-3, rel=0.05)
    deviation = math.sqrt(sum((math.log(d / 2.002e-3) + 0.045) ** 2 for d in one) / len(one))
    assert deviation == pytest.approx(0.3, rel=0.1)
