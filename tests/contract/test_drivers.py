"""What every driver does: `replica.engine.driver` and `replica.engine.types`, rule by rule.

`test_driver_features.py` has what only drivers with a capability do, and that the others refuse it.
"""

import importlib.util
from pathlib import Path

import pytest

from replica.drivers.registry import DRIVERS
from replica.engine.driver import Sleeper
from replica.engine.types import (
    URGENT_PRIORITY,
    Finish,
    Fork,
    RefusedError,
    Sampling,
    SequenceRequest,
)
from sluice.errors import ErrorCode
from sluice.hashing import block_hashes

_spec = importlib.util.spec_from_file_location(
    "contract_driver_subjects", Path(__file__).with_name("driver_subjects.py")
)
subjects = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(subjects)
base, adapters, shelf = subjects.base, subjects.adapters, subjects.shelf
subject, seeded_subject = subjects.subject, subjects.seeded_subject

ROOT_A, ROOT_B = b"a" * 16, b"b" * 16


def request(key: int, prompt: list[int] | int = 5, output: int = 8, **fields) -> SequenceRequest:
    """A greedy request that only its length ends; a number stands for a prompt of so many ids."""
    if isinstance(prompt, int):
        prompt = [20 + (key * 31 + position * 7) % 400 for position in range(prompt)]
    fields = {"ignore_eos": True, **fields}
    return SequenceRequest(key, prompt, output, **fields)


def test_every_registered_driver_is_under_contract(subject) -> None:
    assert subject.name in DRIVERS
    assert set(DRIVERS) == {"openvino", "sim", "trtllm"}
    driver = subject.make()
    assert driver.name == subject.name
    assert driver.limits == driver.limits
    assert (driver.limits.sequences_max, driver.limits.context_tokens_max) == (8, 512)
    assert driver.limits.kv_blocks == subjects.BLOCKS
    assert driver.capabilities == driver.capabilities
    assert not driver.has_work
    assert driver.cached_blocks() == []


def test_each_sequence_ends_once_with_as_many_tokens_as_it_asked_for(subject) -> None:
    lengths = {key: (1 + key * 13 % 90, 1 + key * 7 % 20) for key in range(20)}
    outcome = subject.run(*(request(key, *shape) for key, shape in lengths.items()))
    assert outcome.finished.keys() == lengths.keys() == outcome.admitted.keys()
    for key, (prompt, output) in lengths.items():
        event = outcome.finished[key]
        assert event.reason is Finish.LENGTH
        assert (event.prompt_tokens, event.output_tokens) == (prompt, output)
        assert not event.code


def test_keys_may_be_used_again_when_their_sequences_have_ended(subject) -> None:
    stepper = subject.stepper()
    first = stepper.run(request(1)).tokens[1]
    again = subjects.Stepper(stepper.driver)
    assert again.run(request(1)).tokens[1] == first


def test_a_batch_has_no_influence_on_greedy_answers(subject) -> None:
    alone = {key: subject.run(request(key, 40, 12)).tokens[key] for key in (1, 2)}
    crowd = subject.run(*(request(key, 40, 12) for key in range(12)))
    assert {key: crowd.tokens[key] for key in alone} == alone
    assert crowd.tokens[1] != crowd.tokens[2]


def test_a_resumed_answer_goes_on_as_it_would_have(subject) -> None:
    prompt = list(range(30, 70))
    whole = subject.run(request(1, prompt, 16)).tokens[1]
    rest = subject.run(request(1, prompt + whole[:7], 9, resumed_tokens=7)).tokens[1]
    assert whole[7:] == rest


def test_a_stop_token_ends_a_sequence_and_is_its_last_token(subject) -> None:
    whole = subject.run(request(1, output=20)).tokens[1]
    stop = whole[9]
    first = whole.index(stop)
    stops = frozenset({stop, 1})
    outcome = subject.run(request(1, output=20, ignore_eos=False, stop_token_ids=stops))
    assert outcome.reason(1) is Finish.STOP
    assert outcome.tokens[1] == whole[: first + 1]
    ignored = subject.run(request(1, output=20, stop_token_ids=stops))
    assert ignored.reason(1) is Finish.LENGTH
    assert ignored.tokens[1] == whole


def test_an_end_on_the_last_token_is_a_stop(subject) -> None:
    whole = subject.run(request(1, output=6)).tokens[1]
    length = whole.index(whole[-1]) + 1
    stops = frozenset({whole[-1]})
    outcome = subject.run(request(1, output=length, ignore_eos=False, stop_token_ids=stops))
    assert outcome.reason(1) is Finish.STOP


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({"prompt": []}, ErrorCode.INVALID_REQUEST, ["empty"]),
        ({"output": 0}, ErrorCode.INVALID_REQUEST, ["output_tokens_max", "0"]),
        ({"prompt": 500, "output": 13}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ["500", "13", "512"]),
        ({"prompt": [5, 9999]}, ErrorCode.INVALID_REQUEST, ["vocabulary"]),
        ({"prompt": [5, -1]}, ErrorCode.INVALID_REQUEST, ["vocabulary"]),
        ({"stop_token_ids": frozenset(range(65))}, ErrorCode.INVALID_REQUEST, ["65", "64"]),
        ({"cache_root": b"short"}, ErrorCode.INVALID_REQUEST, ["cache_root", "5", "16"]),
        ({"resumed_tokens": 5}, ErrorCode.INVALID_REQUEST, ["resumed_tokens", "5"]),
        ({"sampling": Sampling(temperature=-1)}, ErrorCode.INVALID_REQUEST, ["-1"]),
        ({"sampling": Sampling(temperature=float("nan"))}, ErrorCode.INVALID_REQUEST, ["nan"]),
        ({"sampling": Sampling(top_p=0)}, ErrorCode.INVALID_REQUEST, ["top_p", "0"]),
        ({"sampling": Sampling(top_k=-2)}, ErrorCode.INVALID_REQUEST, ["top_k", "-2"]),
        ({"forks": (Fork(1, 0),)}, ErrorCode.INVALID_REQUEST, ["key"]),
        ({"draft_tokens_max": 999}, ErrorCode.INVALID_REQUEST, ["draft_tokens_max", "999"]),
    ],
)
def test_an_unservable_request_is_refused_with_the_reason(subject, fields, code, told) -> None:
    driver = subject.make()
    with pytest.raises(RefusedError) as refused:
        driver.add(request(1, **fields))
    assert refused.value.code is code
    for part in told:
        assert part in refused.value.message
    assert not driver.has_work
    stepper = subjects.Stepper(driver)
    assert stepper.run(request(1)).reason(1) is Finish.LENGTH


def test_a_sequence_that_the_pool_cannot_hold_is_refused(subject) -> None:
    driver = subject.make(blocks=4)
    with pytest.raises(RefusedError, match="129 tokens need 5 KV blocks; the engine has 4"):
        driver.add(request(1, 100, 29))
    assert subjects.Stepper(driver).run(request(1, 100, 28)).reason(1) is Finish.LENGTH


def test_the_longest_sequence_that_is_allowed_is_served(subject) -> None:
    outcome = subject.run(request(1, 500, 12), request(2, 1, 511))
    assert [outcome.finished[key].output_tokens for key in (1, 2)] == [12, 511]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_sequence_ends_at_the_next_step_and_harms_no_other(subject, steps) -> None:
    stepper = subject.stepper()
    expected = subject.run(request(2, 100, 20)).tokens[2]
    for key in (1, 2, 3):
        stepper.driver.add(request(key, 100, 20))
    for _ in range(steps):
        stepper.step()
    stepper.driver.cancel(1)
    stepper.driver.cancel(1)
    stepper.driver.cancel(77)
    assert [event.key for event in stepper.step().finished if event.key == 1] == [1]
    outcome = stepper.run()
    assert outcome.reason(1) is Finish.CANCELLED
    assert outcome.reason(2) is outcome.reason(3) is Finish.LENGTH
    assert outcome.tokens[2] == expected
    stepper.driver.cancel(2)
    assert not stepper.driver.has_work
    assert stepper.driver.load().kv_blocks_used == 0


def test_a_waiting_sequence_can_be_cancelled(subject) -> None:
    stepper = subject.stepper(sequences_max=1)
    for key in (1, 2, 3):
        stepper.driver.add(request(key, 10, 10))
    stepper.until(lambda outcome: 1 in outcome.admitted)
    assert (stepper.driver.load().running, stepper.driver.load().waiting) == (1, 2)
    assert stepper.driver.load().prefill_tokens_owed >= 20
    stepper.driver.cancel(2)
    outcome = stepper.run()
    assert outcome.order == [1, 3]
    assert outcome.reason(2) is Finish.CANCELLED


def test_the_most_important_waiting_sequence_comes_first(subject) -> None:
    stepper = subject.stepper(sequences_max=1)
    stepper.driver.add(request(1, 10, 10))
    stepper.until(lambda outcome: 1 in outcome.admitted)
    for key, priority in ((2, 0), (3, 5), (4, 9), (5, 5)):
        stepper.driver.add(request(key, 10, 2, priority=priority))
    assert stepper.run().order == [1, 4, 3, 5, 2]


def test_a_probe_does_not_wait_for_a_place(subject) -> None:
    stepper = subject.stepper(sequences_max=2)
    for key in (1, 2, 3):
        stepper.driver.add(request(key, 10, 300))
    stepper.until(lambda outcome: len(outcome.tokens) == 2)
    stepper.driver.add(request(9, 10, 1, priority=URGENT_PRIORITY))
    stepper.until(lambda outcome: 9 in outcome.finished)
    assert stepper.outcome.finished.keys() == {9}
    for key in (1, 2, 3):
        stepper.driver.cancel(key)
    stepper.run()


def test_time_in_the_queue_counts_from_the_submission(subject) -> None:
    stepper = subject.stepper()
    stepper.driver.add(request(1, submitted_at_s=subject.now() - 5))
    found = []
    while stepper.driver.has_work:
        found += stepper.step().admitted
    assert 5 <= found[0].queue_s < 6


def test_a_known_prompt_is_found_in_the_cache_by_its_own_root_only(subject) -> None:
    driver = subject.make()
    prompt = list(range(40, 140))  # three full blocks
    first = subjects.Stepper(driver).run(request(1, prompt, cache_root=ROOT_A))
    assert first.admitted[1] == 0
    again = subjects.Stepper(driver).run(request(1, prompt, cache_root=ROOT_A))
    assert again.admitted[1] == 96
    assert again.tokens[1] == first.tokens[1]
    foreign = subjects.Stepper(driver).run(request(1, prompt, cache_root=ROOT_B))
    assert foreign.admitted[1] == 0
    load = driver.load()
    assert (load.prompt_tokens, load.cached_tokens) == (300, 96)
    cached = subjects.Stepper(driver).cached(6)
    for root in (ROOT_A, ROOT_B):
        assert set(block_hashes(prompt, root, 3)) <= set(cached)


def test_without_a_prefix_cache_nothing_is_found_nor_told(subject) -> None:
    stepper = subject.stepper(prefix_cache=False)
    for _ in range(2):
        outcome = subjects.Stepper(stepper.driver).run(request(1, 100))
        assert outcome.admitted[1] == 0
    assert stepper.driver.cached_blocks() == []


def test_siblings_end_one_by_one_and_share_their_prompt(subject) -> None:
    stepper = subject.stepper()
    prompt = list(range(40, 140))
    forks = tuple(Fork(10 + index, index) for index in range(3))
    outcome = stepper.run(request(1, prompt, 9, forks=forks))
    assert outcome.finished.keys() == {1, 10, 11, 12} == outcome.admitted.keys()
    assert {event.output_tokens for event in outcome.finished.values()} == {9}
    assert {event.prompt_tokens for event in outcome.finished.values()} == {100}
    assert all(outcome.admitted[fork.key] >= 96 for fork in forks)
    greedy = {tuple(tokens) for tokens in outcome.tokens.values()}
    assert len(greedy) == 1


def test_siblings_of_other_seeds_give_other_answers(seeded_subject) -> None:
    forks = tuple(Fork(10 + seed, seed) for seed in range(5))
    sampling = Sampling(temperature=2.0, seed=99)
    outcome = seeded_subject.run(request(1, 40, 12, sampling=sampling, forks=forks))
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) > 4
    own = Sampling(temperature=2.0, seed=3)
    assert seeded_subject.run(request(1, 40, 12, sampling=own)).tokens[1] == outcome.tokens[13]


def test_a_seed_decides_in_any_batch(seeded_subject) -> None:

    def sampled(key: int) -> SequenceRequest:
        return request(key, 40, 12, sampling=Sampling(temperature=1.5, seed=key, top_k=40))

    alone = seeded_subject.run(sampled(3)).tokens[3]
    crowd = seeded_subject.run(*(sampled(key) for key in range(12)))
    assert crowd.tokens[3] == alone


def test_siblings_live_on_when_their_leader_is_cancelled(subject) -> None:
    stepper = subject.stepper()
    forks = (Fork(10, 0), Fork(11, 1))
    stepper.driver.add(request(1, 100, 9, forks=forks))
    stepper.driver.cancel(1)
    stepper.driver.cancel(11)
    outcome = stepper.run()
    assert {key: event.reason for key, event in outcome.finished.items()} == {
        1: Finish.CANCELLED,
        10: Finish.LENGTH,
        11: Finish.CANCELLED,
    }


def test_more_siblings_than_places_take_turns(subject) -> None:
    forks = tuple(Fork(10 + index, index) for index in range(5))
    outcome = subject.run(request(1, 50, 4, forks=forks), sequences_max=2)
    assert {event.reason for event in outcome.finished.values()} == {Finish.LENGTH}
    assert len(outcome.finished) == 6


def test_a_failed_request_ends_alone_and_may_be_retried_elsewhere(subject) -> None:
    stepper = subjects.Stepper(subject.make_failing())
    outcome = stepper.run(request(1, 10, 4))
    event = outcome.finished[1]
    assert event.reason is Finish.FAILED
    assert event.code == ErrorCode.ENGINE_FAILED
    assert event.message
    again = subjects.Stepper(stepper.driver).run(request(1, 10, 4), request(2, 10, 4))
    assert {event.reason for event in again.finished.values()} == {Finish.LENGTH}
    assert stepper.driver.load().kv_blocks_used == 0


def test_a_full_pool_delays_and_never_loses_a_sequence(subject) -> None:
    outcome = subject.run(*(request(key, 60, 60) for key in range(12)), blocks=12)
    assert {event.reason for event in outcome.finished.values()} == {Finish.LENGTH}
    roomy = subject.run(request(3, 60, 60))
    assert outcome.tokens[3] == roomy.tokens[3]


def test_an_engine_that_slept_answers_as_before_and_has_its_blocks_again(subject) -> None:
    stepper = subject.stepper()
    driver = stepper.driver
    if not isinstance(driver, Sleeper):
        assert subject.name == "trtllm"
        return
    before = stepper.run(request(1, 100, 8)).tokens[1]
    cached = driver.cached_blocks()
    assert driver.sleep(4)
    assert driver.cached_blocks() == []
    assert stepper.run(request(2, 4, 1)).reason(2) is Finish.LENGTH
    driver.wake(driver.restored())
    awake = subjects.Stepper(driver)
    outcome = awake.run(request(1, 100, 8))
    assert outcome.tokens[1] == before
    assert len(driver.cached_blocks()) == len(cached)
    crowd = subjects.Stepper(driver).run(*(request(key, 40, 12) for key in range(12)))
    assert {event.reason for event in crowd.finished.values()} == {Finish.LENGTH}


def test_an_engine_with_work_stays_awake(subject) -> None:
    driver = subject.make()
    if isinstance(driver, Sleeper):
        driver.add(request(1))
        assert not driver.sleep(4)
        assert subjects.Stepper(driver).driver.has_work
