"""Compares the sampler with the documented order in plain Python, row by row."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.sampler import Sampler
from replica.engine.sampling import uniforms
from replica.engine.types import Sampling, SequenceRequest

VOCABULARY = 90
EOS = frozenset({2, 3})
EPSILON = 1e-5  # precision of float32 compared with float64


def adjusted(logits: list[float], sequence: ScheduledSequence) -> list[float]:
    sampling, request = sequence.request.sampling, sequence.request
    values = list(logits)
    output = sequence.tokens[len(request.prompt) - request.resumed_tokens :]
    for token in set(sequence.tokens):
        value, penalty = values[token], sampling.repetition_penalty
        values[token] = value / penalty if value > 0 else value * penalty
    for token, count in Counter(output).items():
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if len(output) < sampling.tokens_min:
        for token in EOS | request.stop_token_ids:
            values[token] = -math.inf
    return values


def drawn(values: list[float], sampling: Sampling, draw: float, top_p: float, min_p: float) -> int:
    best = max(values)
    weights = [math.exp((value - best) / sampling.temperature) for value in values]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    ranked = ranked[: sampling.top_k or None]
    total, mass = sum(weights[token] for token in ranked), 0.0
    kept: set[int] = set()
    for token in ranked:
        if mass >= top_p * total and kept:
            break
        mass += weights[token]
        kept.add(token)
    kept = {token for token in kept if weights[token] >= min_p}
    total, running = sum(weights[token] for token in kept), 0.0
    for token in sorted(kept):
        running += weights[token]
        if running > draw * total:
            return token
    return max(kept)


def is_right(token: int, logits: list[float], sequence: ScheduledSequence) -> bool:
    """Whether the documented order selects this token, within the precision of float32."""
    sampling, position = sequence.request.sampling, len(sequence.tokens)
    values = adjusted(logits, sequence)
    if sampling.temperature == 0:
        return values[token] >= max(values) - EPSILON
    draw = float(uniforms([sampling.seed], [position])[0])
    signs = (0, -1, 1)
    return any(
        token
        == drawn(
            values,
            sampling,
            min(max(draw + a * EPSILON, 0.0), 1 - 1e-9),
            sampling.top_p + b * EPSILON if sampling.top_p < 1 else 2.0,
            sampling.min_p * (1 + c * EPSILON),
        )
        for a, b, c in product(signs, signs, signs)
    )


def samplings() -> st.SearchStrategy[Sampling]:
    tokens = st.integers(0, VOCABULARY - 1)
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        top_p=st.sampled_from([0.1, 0.5, 0.93, 1.0]),
        top_k=st.sampled_from([0, 1, 4, 30, 200]),
        min_p=st.sampled_from([0.0, 0.02, 0.4]),
        seed=st.integers(0, 2**64 - 1),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.3]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.8, 0.8]),
        logit_bias=st.dictionaries(
            tokens, st.sampled_from([-100.0, -2.0, 1.5, 100.0]), max_size=4
        ).map(lambda biases: tuple(biases.items())),
        tokens_min=st.sampled_from([0, 0, 3, 100]),
        logprobs=st.sampled_from([-1, 0, 3]),
    )


@st.composite
def sequences(draw: st.DrawFn) -> ScheduledSequence:
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
    request = SequenceRequest(
        key=draw(st.integers(0, 1000)),
        prompt=prompt,
        output_tokens_max=100,
        stop_token_ids=draw(st.sampled_from([frozenset(), frozenset({10}), frozenset({10, 11})])),
        sampling=draw(samplings()),
        resumed_tokens=draw(st.integers(0, len(prompt) - 1)),
    )
    return ScheduledSequence(request, 0, b"", request.stop_token_ids | EOS)


@settings(max_examples=40)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_every_token_follows_the_documented_order(
    batch: list[ScheduledSequence], seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    sampler = Sampler(VOCABULARY, EOS)
    for step in range(5):
        logits = rng.normal(0, scale, (len(batch), VOCABULARY)).astype(np.float32)
        before = logits.copy()
        plan = StepPlan(batch, [])
        if step % 2:
            sampler.prepare(plan)
        output = sampler.sample(logits, plan)
        assert (logits == before).all(), "the backend's own memory"
        assert not output.failed
        assert output.logprobs.keys() == {
            i for i, s in enumerate(batch) if s.request.sampling.logprobs >= 0
        }
        for row, (sequence, token) in enumerate(zip(batch, output.tokens, strict=True)):
            assert is_right(token, logits[row].tolist(), sequence)
            if row in output.logprobs:
                check_logprobs(logits[row], token, sequence, output.logprobs[row])
            sequence.tokens.append(token)
        if step == 3:  # as after a preemption or in another process, the result must be the same
            for sequence in batch[::2]:
                sequence.sampler = None


def check_logprobs(row: np.ndarray, token: int, sequence: ScheduledSequence, entries: list) -> None:
    assert len(entries) == 1
    entry = entries[0]
    values = row.tolist()
    best = max(values)
    total = best + math.log(math.fsum(math.exp(value - best) for value in values))
    assert entry.key == sequence.request.key
    assert math.isclose(entry.logprob, values[token] - total, abs_tol=1e-5)
    order = sorted(range(VOCABULARY), key=lambda other: (-values[other], other))
    order = order[: sequence.request.sampling.logprobs]
    assert [other for other, _ in entry.top] == order
    assert all(math.isclose(v, values[t] - total, abs_tol=1e-5) for t, v in entry.top)


@settings(max_examples=60)
@given(
    sequence=sequences(),
    length=st.integers(1, 5),
    right=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_drafts_of_every_kind_change_nothing_but_the_number_of_steps(
    sequence: ScheduledSequence, length: int, right: int, seed: int
) -> None:
    """The model is a table, in which the row of logits depends only on the position."""
    table = np.random.default_rng(seed).normal(0, 2, (40, VOCABULARY)).astype(np.float32)
    sampler = Sampler(VOCABULARY, EOS)
    request = sequence.request
    drafted = ScheduledSequence(request, 0, b"", sequence.stop_ids)
    truth: list[int] = []
    entries = []
    for _ in range(length + 1):
        at = len(sequence.tokens)
        output = sampler.sample(table[at : at + 1], StepPlan([sequence], []))
        truth += output.tokens
        entries += output.logprobs.get(0, [])
        sequence.tokens.extend(output.tokens)
    draft = truth[:length]
    if right < length:
        draft[right] = (draft[right] + 1) % VOCABULARY
    plan = StepPlan([drafted], [])
    plan.drafts = {0: draft}
    at = len(drafted.tokens)
    output = sampler.sample(table[at : at + length + 1], plan)
    stops = [i for i, token in enumerate(truth) if token in sequence.stop_ids]
    accepted = min(right, length, *stops)
    assert output.tokens + output.more.get(0, []) == truth[: accepted + 1]
    assert output.logprobs.get(0, []) == entries[: accepted + 1]


@settings(max_examples=40)
@given(leader=sequences(), seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_siblings_are_sequences_of_their_own(leader: ScheduledSequence, seeds: list[int]) -> None:
    """The model is a table, in which the row of logits depends only on the position."""
    table = np.random.default_rng(7).normal(0, 2, (40, VOCABULARY)).astype(np.float32)
    request, prompt = leader.request, leader.tokens[:]
    alone, together = Sampler(VOCABULARY, EOS), Sampler(VOCABULARY, EOS)
    forks, wanted = [], []
    for seed in seeds:
        own = replace(request, sampling=replace(request.sampling, seed=seed))
        forks.append(ScheduledSequence(own, 0, b"", leader.stop_ids))
        single = ScheduledSequence(own, 0, b"", leader.stop_ids)
        for at in range(len(prompt), len(prompt) + 4):
            single.tokens.extend(alone.sample(table[at : at + 1], StepPlan([single], [])).tokens)
        wanted.append(single.tokens)
    family = [leader, *forks]
    plan = StepPlan([], [(leader, len(prompt))], family)
    plan.fork_of = dict.fromkeys(range(1, len(family)), 0)
    for at in range(len(prompt), len(prompt) + 4):
        tokens = together.sample(table[[at] * (1 if plan.fork_of else len(family))], plan).tokens
        for sequence, token in zip(family, tokens, strict=True):
            sequence.tokens.append(token)
        plan = StepPlan(family, [])
    assert [fork.tokens for fork in forks] == wanted


@settings(max_examples=30)
@given(batch=st.lists(sequences(), min_size=2, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_a_sequence_does_not_notice_its_batch(batch: list[ScheduledSequence], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(batch), VOCABULARY)).astype(np.float32)
    sampler = Sampler(VOCABULARY, EOS)
    together = sampler.sample(logits, StepPlan(batch, []))
    for row, sequence in enumerate(batch):
        alone = sampler.sample(logits[row : row + 1], StepPlan([sequence], []))
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs.get(0) == together.logprobs.get(row)


@settings(max_examples=40)
@given(values=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=70))
def test_of_equal_tokens_the_lowest_ids_stay(values: list[float]) -> None:
    logits = np.array([values], np.float32)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    for top_k in (1, 2, 5):
        rows = [
            ScheduledSequence(
                SequenceRequest(1, [0] * at, 9, sampling=Sampling(temperature=9.0, top_k=top_k)),
                0,
                b"",
                frozenset(),
            )
            for at in range(1, 40)
        ]
        plan = StepPlan(rows, [])
        tokens = Sampler(len(values), frozenset()).sample(logits.repeat(39, axis=0), plan).tokens
        assert set(tokens) <= set(order[:top_k])
