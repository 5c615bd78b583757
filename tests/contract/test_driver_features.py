"""What drivers with a capability do, and that the others refuse it instead of ignoring it."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from replica.engine.driver import ChecksGrammars
from replica.engine.types import (
    NO_DRAFTS,
    Finish,
    Fork,
    Grammar,
    GrammarKind,
    KvBlocks,
    RefusedError,
    Sampling,
    SequenceRequest,
)
from sluice.errors import ErrorCode
from sluice.hashing import cache_root

_spec = importlib.util.spec_from_file_location(
    "contract_driver_subjects", Path(__file__).with_name("driver_subjects.py")
)
subjects = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(subjects)
base, adapters, shelf = subjects.base, subjects.adapters, subjects.shelf
subject = subjects.subject
Stepper = subjects.Stepper

# Every digest is a string that names an artifact; drivers make nothing of it.
ONE, TWO, THREE, FOUR = (f"adapter-{index}" for index in range(4))


def request(key: int, output: int = 8, **fields) -> SequenceRequest:
    prompt = [20 + position * 7 % 400 for position in range(40)]
    return SequenceRequest(key, prompt, output, **{"ignore_eos": True, **fields})


def adapted(key: int, digest: str, **fields) -> SequenceRequest:
    """A request for an adapter, with the root that the host gives it."""
    return request(key, adapter_digest=digest, cache_root=cache_root("base", digest, b""), **fields)


def is_refused(driver, wanted: SequenceRequest, code: ErrorCode, param: str) -> str:
    """Assert that a request is refused and nothing taken; return the message."""
    with pytest.raises(RefusedError) as refused:
        driver.add(wanted)
    assert (refused.value.code, refused.value.param) == (code, param), refused.value.message
    assert not driver.has_work
    return refused.value.message


def put(subject, driver, *digests: str) -> None:
    for digest in digests:
        driver.put_adapter(digest, driver.read_adapter(digest, subject.adapters[digest]))


# --- Adapters ---------------------------------------------------------------------------------


def test_an_adapter_changes_answers_and_keeps_its_own_cache(subject) -> None:
    driver = subject.make(**subjects.ADAPTERS)
    assert driver.capabilities.adapter_slots == 2
    assert driver.capabilities.adapter_rank_max == 8
    put(subject, driver, ONE, TWO)
    assert driver.has_adapter(ONE)
    wanted = [
        request(1),
        adapted(2, ONE),
        adapted(3, TWO),
    ]
    outcome = Stepper(driver).run(*wanted)
    assert {event.reason for event in outcome.finished.values()} == {Finish.LENGTH}
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == 3
    assert set(outcome.admitted.values()) == {0}
    alone = subject.make(**subjects.ADAPTERS)
    put(subject, alone, ONE)
    assert Stepper(alone).run(wanted[1]).tokens[2] == outcome.tokens[2]


def test_adapters_report_their_activity(subject) -> None:
    driver = subject.make(**subjects.ADAPTERS)
    put(subject, driver, ONE, TWO)
    assert {state.digest for state in driver.adapters()} == {ONE, TWO}
    assert driver.load().adapters_resident == ()
    stepper = Stepper(driver)
    stepper.driver.add(adapted(1, ONE))
    stepper.until(lambda outcome: 1 in outcome.tokens)
    assert driver.load().adapters_resident == (ONE,)
    states = {state.digest: state for state in driver.adapters()}
    assert (states[ONE].sequences, states[TWO].sequences) == (1, 0)
    assert states[ONE].is_in_slot
    assert not states[TWO].is_in_slot
    stepper.run()
    state = next(state for state in driver.adapters() if state.digest == ONE)
    assert (state.sequences, state.prompt_tokens, state.output_tokens) == (0, 40, 8)
    assert (state.loads, state.rank) == (1, 8)
    assert state.memory_bytes > 0


def test_more_adapters_than_slots_are_all_served(subject) -> None:
    driver = subject.make(**subjects.ADAPTERS)
    digests = [ONE, TWO, THREE, FOUR]
    put(subject, driver, *digests)
    wanted = [adapted(key, digests[key % 4]) for key in range(12)]
    outcome = Stepper(driver).run(*wanted)
    assert {event.reason for event in outcome.finished.values()} == {Finish.LENGTH}
    assert [outcome.tokens[key] == outcome.tokens[key % 4] for key in range(12)] == [True] * 12
    assert len(driver.load().adapters_resident) == 2


def test_a_request_waiting_for_a_slot_does_not_block_the_requests_behind_it(subject) -> None:
    driver = subject.make(**{**subjects.ADAPTERS, "adapter_slots": 1})
    put(subject, driver, ONE, TWO)
    stepper = Stepper(driver)
    driver.add(adapted(1, ONE, output=400))
    stepper.until(lambda outcome: 1 in outcome.tokens)
    driver.add(adapted(2, TWO))
    driver.add(request(3))
    driver.add(adapted(4, ONE))
    stepper.until(lambda outcome: {3, 4} <= outcome.finished.keys())
    assert stepper.outcome.admitted.keys() == {1, 3, 4}
    driver.cancel(1)
    assert stepper.run().reason(2) is Finish.LENGTH


def test_a_dropped_adapter_serves_its_running_requests_and_no_new_ones(subject) -> None:
    driver = subject.make(**subjects.ADAPTERS)
    put(subject, driver, ONE)
    stepper = Stepper(driver)
    driver.add(adapted(1, ONE, forks=(Fork(5, 1),)))
    driver.drop_adapter(ONE)
    driver.drop_adapter(TWO)
    assert not driver.has_adapter(ONE)
    with pytest.raises(RefusedError) as refused:
        driver.add(adapted(2, ONE))
    assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND
    assert ONE in refused.value.message
    outcome = stepper.run()
    assert {outcome.reason(1), outcome.reason(5)} == {Finish.LENGTH}
    assert driver.adapters() == []
    put(subject, driver, ONE)
    assert Stepper(driver).run(adapted(1, ONE)).reason(1) is Finish.LENGTH


def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(subject, tmp_path) -> None:
    driver = subject.make(**{**subjects.ADAPTERS, "adapter_rank": 4})
    with pytest.raises(RefusedError) as refused:
        driver.read_adapter(ONE, subject.adapters[ONE])
    assert refused.value.code is ErrorCode.ADAPTER_INVALID
    assert "8" in refused.value.message
    assert "4" in refused.value.message
    with pytest.raises(RefusedError, match=r"adapter_config\.json"):
        driver.read_adapter(ONE, tmp_path)


def test_adapters_in_use_are_not_pushed_out_of_memory(subject) -> None:
    measure = subject.make(**subjects.ADAPTERS)
    size = measure.read_adapter(ONE, subject.adapters[ONE]).memory_bytes
    room = {"adapter_memory_bytes": int(size * 1.5)}
    driver = subject.make(**subjects.ADAPTERS, **room)
    put(subject, driver, ONE)
    put(subject, driver, TWO)
    assert not driver.has_adapter(ONE)
    driver.add(adapted(1, TWO))
    with pytest.raises(RefusedError) as refused:
        put(subject, driver, THREE)
    assert refused.value.code is ErrorCode.ENGINE_BUSY
    assert Stepper(driver).run().reason(1) is Finish.LENGTH


def test_without_slots_adapters_are_refused(subject) -> None:
    driver = subject.make(adapter_slots=0)
    assert driver.capabilities.adapter_slots == 0
    is_refused(driver, adapted(1, ONE), ErrorCode.UNSUPPORTED_PARAMETER, "adapter_digest")
    served = subject.make(**subjects.ADAPTERS)
    with pytest.raises(RefusedError) as refused:
        driver.put_adapter(ONE, served.read_adapter(ONE, subject.adapters[ONE]))
    assert refused.value.code is ErrorCode.UNSUPPORTED_PARAMETER
    is_refused(served, adapted(1, ONE), ErrorCode.ADAPTER_NOT_FOUND, "adapter_digest")


# --- KV blocks --------------------------------------------------------------------------------


def test_blocks_move_to_another_engine_or_are_refused(subject) -> None:
    source, target = subject.make(), subject.make()
    stepper = Stepper(source)
    first = stepper.run(request(1))
    hashes = stepper.cached(1)[:1]
    if not source.capabilities.has_kv_transfer:
        for call in (
            lambda: source.export_blocks(hashes),
            lambda: target.import_blocks(KvBlocks("any", tuple(hashes), (b"0",))),
        ):
            with pytest.raises(RefusedError) as refused:
                call()
            assert refused.value.code is ErrorCode.UNSUPPORTED_PARAMETER
        return
    blocks = source.export_blocks([*hashes, b"unknown" + bytes(9)])
    assert blocks.hashes == tuple(hashes)
    assert target.import_blocks(blocks) == 1
    stepper = Stepper(target)
    again = stepper.run(request(1))
    assert again.admitted[1] == 32
    assert again.tokens[1] == first.tokens[1]
    with pytest.raises(RefusedError) as refused:
        target.import_blocks(replace(blocks, layout="another"))
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_pinned_blocks_stay(subject) -> None:
    driver = subject.make(blocks=8)
    stepper = Stepper(driver)
    stepper.run(replace(request(1), pinned_blocks=1))
    held = stepper.cached(1)[0]
    pinned = driver.load().kv_blocks_pinned
    assert pinned == int(driver.capabilities.has_kv_transfer)
    for key in range(2, 8):
        others = SequenceRequest(key, [key * 50 + i for i in range(40)], 60, ignore_eos=True)
        Stepper(driver).run(others)
    if pinned:
        assert held in driver.cached_blocks()


# --- Logprobs, logits, grammars, drafts -------------------------------------------------------


def test_logprobs_stand_beside_tokens_or_are_refused(subject) -> None:
    driver = subject.make()
    limit = driver.capabilities.logprobs_max
    if not limit:
        for wanted in (0, 3):
            message = is_refused(
                driver,
                request(1, sampling=Sampling(logprobs=wanted)),
                ErrorCode.UNSUPPORTED_PARAMETER,
                "logprobs",
            )
            assert "logprobs" in message
        return
    outcome = Stepper(driver).run(
        request(1, sampling=Sampling(logprobs=3)),
        request(2, sampling=Sampling(logprobs=0)),
        request(3),
    )
    assert outcome.logprobs.keys() == {1, 2}
    assert outcome.tokens[1] == outcome.tokens[3]
    for key, count in ((1, 3), (2, 0)):
        entries = outcome.logprobs[key]
        assert len(entries) == len(outcome.tokens[key])
        for token, entry in zip(outcome.tokens[key], entries, strict=True):
            assert entry.logprob <= 0
            assert len(entry.top) == count
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            if count:
                assert entry.top[0] == (token, entry.logprob)  # greedy
    too_many = request(1, sampling=Sampling(logprobs=limit + 1))
    message = is_refused(driver, too_many, ErrorCode.INVALID_REQUEST, "logprobs")
    assert str(limit) in message
    assert str(limit + 1) in message


def test_prompt_logprobs_cover_the_prompt_or_are_refused(subject) -> None:
    driver = subject.make()
    if not driver.capabilities.has_prompt_logprobs:
        wanted = request(1, prompt_logprobs=0)
        is_refused(driver, wanted, ErrorCode.UNSUPPORTED_PARAMETER, "prompt_logprobs")
        return
    for _ in range(2):  # the second time, the prompt is cached
        wanted = request(1, prompt_logprobs=2)
        outcome = Stepper(driver).run(wanted)
        parts = sorted(outcome.prompts[1], key=lambda part: part.first)
        position = 1
        for part in parts:
            assert part.first == position
            position += len(part.tokens)
            assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in part.tokens)
        assert position == len(wanted.prompt)


CHANGES = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5},
    {"min_p": 0.5},
    {"tokens_min": 2},
    {"logit_bias": ((9, 5.0),)},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_changes_of_the_distribution_are_served_or_refused(subject, changes) -> None:
    driver = subject.make()
    wanted = request(1, sampling=Sampling(temperature=1.0, **changes))
    if driver.capabilities.has_penalties:
        assert Stepper(driver).run(wanted).reason(1) is Finish.LENGTH
    else:
        is_refused(driver, wanted, ErrorCode.UNSUPPORTED_PARAMETER, *changes)


def test_a_bias_decides_where_there_are_logits(subject) -> None:
    driver = subject.make()
    if driver.capabilities.has_penalties:
        forced = request(1, sampling=Sampling(logit_bias=((77, 100.0),)))
        assert Stepper(driver).run(forced).tokens[1] == [77] * 8


GRAMMARS = [
    Grammar(GrammarKind.JSON),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    Grammar(GrammarKind.REGEX, "[a-z]+"),
    Grammar(GrammarKind.CHOICE, '["yes", "no"]'),
    Grammar(GrammarKind.EBNF, 'start: "a" "b"+'),
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_grammars_are_served_or_refused(subject, grammar) -> None:
    driver = subject.make()
    wanted = request(1, ignore_eos=False, sampling=Sampling(grammar=grammar))
    if not driver.capabilities.has_grammars:
        message = is_refused(driver, wanted, ErrorCode.UNSUPPORTED_PARAMETER, "grammar")
        assert "grammar" in message
        return
    reason = Stepper(driver).run(wanted).reason(1)
    assert reason in (Finish.STOP, Finish.LENGTH)


def test_a_grammar_that_is_none_costs_only_its_sender(subject) -> None:
    driver = subject.make()
    broken = Grammar(GrammarKind.CHOICE, "yes or no")
    code = ErrorCode.INVALID_REQUEST
    if not driver.capabilities.has_grammars:
        code = ErrorCode.UNSUPPORTED_PARAMETER
    wanted = request(1, sampling=Sampling(grammar=broken))
    is_refused(driver, wanted, code, "grammar")
    if isinstance(driver, ChecksGrammars):
        driver.check_grammar(request(2))
        if driver.capabilities.has_grammars:
            with pytest.raises(RefusedError, match="grammar"):
                driver.check_grammar(wanted)


def test_drafts_do_not_change_an_answer_or_are_refused(subject) -> None:
    driver = subject.make()
    wanted = request(1, 60, draft_tokens_max=4)
    if not driver.capabilities.has_drafts:
        param = "draft_tokens_max"
        message = is_refused(driver, wanted, ErrorCode.UNSUPPORTED_PARAMETER, param)
        assert param in message
        return
    plain = Stepper(subject.make()).run(request(1, 60)).tokens[1]
    # What comes next stands in the prompt, so that lookups find it.
    prompt = [*request(1).prompt, *plain, *request(1).prompt]
    seen = SequenceRequest(2, prompt, 40, ignore_eos=True, draft_tokens_max=4)
    without = Stepper(subject.make()).run(replace(seen, draft_tokens_max=0)).tokens[2]
    stepper = Stepper(driver)
    assert stepper.run(wanted).tokens[1] == plain
    assert stepper.run(seen).tokens[2] == without
    load = driver.load()
    assert 0 <= load.accepted_tokens <= load.draft_tokens


def test_a_prediction_does_not_change_an_answer_or_is_ignored(subject) -> None:
    driver = subject.make()
    asked = request(1, 60)
    plain = Stepper(subject.make()).run(asked).tokens[1]
    if not driver.capabilities.has_drafts:
        answer = Stepper(driver).run(replace(asked, prediction=[5, 6, 7]))
        assert answer.tokens[1] == plain
        assert answer.finished[1].drafts == NO_DRAFTS
        return
    changed = [*plain[:20], 3, 4, *plain[25:]]
    for prediction, least in ((plain, 50), (changed, 30), ([9] * 30, 0)):
        answer = Stepper(subject.make()).run(replace(asked, prediction=prediction))
        assert answer.tokens[1] == plain
        drafts = answer.finished[1].drafts
        assert drafts.prediction_accepted >= least
        assert drafts.prediction_accepted <= drafts.prediction_tried <= drafts.tried
    resumed = replace(
        asked, prompt=[*asked.prompt, *plain[:10]], resumed_tokens=10, output_tokens_max=50
    )
    answer = Stepper(subject.make()).run(replace(resumed, prediction=plain))
    assert answer.tokens[1] == plain[10:]
    assert answer.finished[1].drafts.prediction_accepted > 40
    for wrong in ([1 << 30], [5] * 100_000):
        is_refused(
            driver, replace(asked, prediction=wrong), ErrorCode.INVALID_REQUEST, "prediction"
        )
