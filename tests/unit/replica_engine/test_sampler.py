import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine import sampler as sampler_module
from replica.engine.penalties import PenaltyCounts
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.sampler import Sampler
from replica.engine.sampling import sample
from replica.engine.types import Sampling, SequenceRequest

VOCABULARY = 40
EOS = frozenset({2, 3})
GREEDY = Sampling()


def sequence(tokens: list[int], sampling: Sampling = GREEDY, **options) -> ScheduledSequence:
    request = SequenceRequest(1, tokens, 100, sampling=sampling, **options)
    return ScheduledSequence(request, 0, b"", request.stop_token_ids | EOS)


def noise(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)


def test_decoding_and_finished_prompts_get_their_rows_in_order() -> None:
    decode = [sequence([1, 2, 3], Sampling(temperature=1.0, seed=seed)) for seed in range(3)]
    unfinished, finished = sequence([5] * 9), sequence([7] * 4)
    plan = StepPlan(decode, [(unfinished, 3), (finished, 4)])
    logits = noise(4)
    output = Sampler(VOCABULARY, EOS).sample(logits, plan)
    rows = [(s.request.sampling, len(s.tokens)) for s in (*decode, finished)]
    assert output.tokens == sample(logits, rows)
    assert not output.more
    assert not output.failed


def test_forks_share_a_row_and_draw_for_themselves() -> None:
    ahead, parent, behind = sequence([9], Sampling(seed=4)), sequence([1, 2]), sequence([3])
    forks = [sequence([1, 2], Sampling(temperature=1.0, seed=seed)) for seed in range(20)]
    sampled = [ahead, parent, *forks, behind]
    plan = StepPlan([ahead], [(parent, 2), (behind, 1)], sampled)
    plan.fork_of = dict.fromkeys(range(2, 22), 1)
    logits = noise(3)
    tokens = Sampler(VOCABULARY, EOS).sample(logits, plan).tokens
    best = logits.argmax(axis=1).tolist()
    assert (tokens[0], tokens[1], tokens[-1]) == (best[0], best[1], best[2])
    assert tokens[2:-1] == sample(
        np.repeat(logits[1:2], 20, axis=0), [(f.request.sampling, 2) for f in forks]
    )
    assert len(set(tokens[2:-1])) > 3


@settings(max_examples=60)
@given(
    right=st.integers(0, 5),
    length=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 99),
)
def test_a_draft_changes_nothing_but_the_number_of_steps(
    right: int, length: int, temperature: float, seed: int
) -> None:
    """The model is a table, in which the row of logits depends only on the position."""
    table = noise(20, seed)
    start = [1, 4]
    one_by_one = sequence(start, Sampling(temperature=temperature, seed=seed))
    sampler = Sampler(VOCABULARY, frozenset())
    while len(one_by_one.tokens) < 8:
        at = len(one_by_one.tokens)
        one_by_one.tokens.extend(
            sampler.sample(table[at : at + 1], StepPlan([one_by_one], [])).tokens
        )
    truth = one_by_one.tokens[len(start) :].tolist()
    draft = truth[:length]
    if right < length:
        draft[right] = (draft[right] + 1) % VOCABULARY
    other, drafted = (sequence(start, one_by_one.request.sampling) for _ in range(2))
    other.stop_ids = drafted.stop_ids = frozenset()
    plan = StepPlan([other, drafted, other], [])
    plan.drafts = {1: draft}
    rows = [2, *range(2, 3 + length), 2]
    output = sampler.sample(table[rows], plan)
    assert output.tokens == [truth[0]] * 3
    accepted = min(right, length)
    assert output.more == ({1: truth[1 : accepted + 1]} if accepted else {})


def test_a_run_ends_with_its_first_stop_token() -> None:
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[range(4), [7, 2, 8, 9]] = 1.0
    plan = StepPlan([sequence([1])], [])
    plan.drafts = {0: [7, 2, 8]}
    output = Sampler(VOCABULARY, EOS).sample(logits, plan)
    assert output.tokens + output.more[0] == [7, 2]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = noise(6)
    logits[1, 5] = np.nan
    logits[4, 5] = np.nan
    cold, warm = Sampling(), Sampling(temperature=1.0)
    sequences = [sequence([1], sampling) for sampling in (cold, cold, warm, warm, warm, cold)]
    output = Sampler(VOCABULARY, EOS).sample(logits, StepPlan(sequences, []))
    assert output.failed.keys() == {1, 4}
    assert not output.refused, "another replica may have a better copy of the weights"
    assert "not finite" in output.failed[1]
    assert all(output.tokens[i] >= 0 for i in (0, 2, 3, 5))


def test_a_row_of_a_draft_that_is_not_finite_ends_the_run_before_it() -> None:
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[range(2), [7, 8]] = 1.0
    logits[2] = np.nan
    plan = StepPlan([sequence([1])], [])
    plan.drafts = {0: [7, 8]}
    output = Sampler(VOCABULARY, EOS).sample(logits, plan)
    assert (output.tokens, output.more, output.failed) == ([7], {0: [8]}, {})


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("alternatives", [0, 2])
def test_prompt_logprobs_do_not_depend_on_the_chunks(chunk: int, alternatives: int) -> None:
    prompt = [4, 9, 9, 1, 30, 7, 11]
    rows = noise(len(prompt))  # row i predicts the token after position i
    decoding, silent = sequence([3]), sequence([8] * 20)
    scored = sequence(prompt, Sampling(logprobs=0), prompt_logprobs=alternatives)
    sampler = Sampler(VOCABULARY, EOS)
    parts = []
    while scored.computed < len(prompt):
        count = min(chunk, len(prompt) - scored.computed)
        ends = scored.computed + count == len(prompt)
        plan = StepPlan([decoding], [(silent, 2), (scored, count)])
        own = rows[scored.computed : scored.computed + count]
        logits = np.concatenate([noise(1, 5), own[-1:], own[:-1]] if ends else [noise(1, 5), own])
        output = sampler.sample(logits, plan)
        assert len(output.tokens) == 1 + ends
        parts += output.prompt_logprobs
        scored.computed += count
    assert [part.first for part in parts] == [
        first for first in range(1, len(prompt) + 1, chunk) if first < len(prompt)
    ]
    entries = [entry for part in parts for entry in part.tokens]
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries, 1):
        values = rows[position - 1].astype(np.float64)
        logprobs = values - np.log(np.exp(values).sum())
        assert entry.key == 1
        assert np.isclose(entry.logprob, logprobs[prompt[position]], atol=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-values)[:alternatives].tolist()


def test_several_prompts_are_reported_in_one_step_and_each_position_once() -> None:
    first = sequence([1, 2, 3, 4], prompt_logprobs=0)
    again = sequence([5, 6, 7, 8], prompt_logprobs=0)
    again.tokens.extend([9, 10])  # preempted after two tokens, when its prompt had been reported
    again.scored = 4
    half = sequence([5, 6, 7, 8, 9], prompt_logprobs=0)
    half.scored = 3  # preempted in the middle of its prompt
    rows = noise(2 + 3 + 5 + 4)
    plan = StepPlan([], [(first, 4), (again, 6), (half, 4)])
    output = Sampler(VOCABULARY, EOS).sample(rows, plan)
    assert output.tokens == rows[:2].argmax(axis=1).tolist()
    assert [(part.first, len(part.tokens)) for part in output.prompt_logprobs] == [(1, 3), (3, 2)]
    values = rows[2 + 3 + 5 + 3].astype(np.float64)
    expected = values[9] - np.log(np.exp(values).sum())
    assert np.isclose(output.prompt_logprobs[1].tokens[1].logprob, expected, atol=1e-5)


def test_logprobs_of_equal_tokens_are_in_the_order_of_their_ids() -> None:
    for vocabulary in (7, 40, 5000):
        logits = np.zeros((1, vocabulary), np.float32)
        logits[0, [5, 6]] = 1.0
        one = sequence([1], Sampling(logprobs=4))
        output = Sampler(vocabulary, frozenset()).sample(logits, StepPlan([one], []))
        assert [token for token, _ in output.logprobs[0][0].top] == [5, 6, 0, 1]


def test_a_step_of_prompt_rows_alone_reports_them() -> None:
    one = sequence([1, 2, 3, 4], prompt_logprobs=1)
    output = Sampler(VOCABULARY, EOS).sample(noise(2), StepPlan([], [(one, 2)]))
    assert output.tokens == []
    assert [(part.first, len(part.tokens)) for part in output.prompt_logprobs] == [(1, 2)]


def test_penalties_count_the_draft_before_each_row() -> None:
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.5, 2.0
    one = sequence([1, 7], Sampling(frequency_penalty=1.0))
    plan = StepPlan([one], [])
    for draft, expected in (([7, 8, 9], [7, 8, 7]), ([7, 7, 7], [7, 8]), ([8, 8, 8], [7])):
        plan.drafts = {0: draft}
        output = Sampler(VOCABULARY, EOS).sample(logits, plan)
        assert output.tokens + output.more.get(0, []) == expected


def test_the_minimum_length_counts_the_draft_before_each_row() -> None:
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[:, 2], logits[:, 5] = 2.0, 1.0
    plan = StepPlan([sequence([1], Sampling(tokens_min=2))], [])
    plan.drafts = {0: [5, 5]}
    output = Sampler(VOCABULARY, EOS).sample(logits, plan)
    assert output.tokens + output.more[0] == [5, 5, 2]


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 8), (-1.0, 8)])
def test_a_repetition_penalty_lowers_seen_tokens_of_either_sign(sign: float, expected: int) -> None:
    logits = np.full((1, VOCABULARY), -9.0, np.float32)
    logits[0, 7], logits[0, 8] = (2.0, 1.5) if sign > 0 else (-1.5, -2.0)
    one = sequence([7], Sampling(repetition_penalty=2.0))
    output = Sampler(VOCABULARY, EOS).sample(logits, StepPlan([one], []))
    assert output.tokens == [expected]


def test_siblings_count_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    class Counting(PenaltyCounts):
        def __init__(self, prompt) -> None:
            counted.append(len(prompt))
            super().__init__(prompt)

    monkeypatch.setattr(sampler_module, "PenaltyCounts", Counting)
    family = [sequence([5] * 30, Sampling(repetition_penalty=1.5)) for _ in range(4)]
    plan = StepPlan([], [(family[0], 30)], family)
    plan.fork_of = dict.fromkeys(range(1, 4), 0)
    assert len(set(Sampler(VOCABULARY, EOS).sample(noise(1), plan).tokens)) == 1
    assert counted == [30]
