"""Compares logprobs, and the logits behind them, with `reference_logits`."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from replica.engine.types import Grammar, GrammarKind, Sampling

_random = random.Random(2)
PROMPT = [_random.randrange(3, 470) for _ in range(130)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("adapter", ["", "adapter-1"])
@pytest.mark.parametrize("pressure", [False, True], ids=["calm", "preempted"])
def test_logprobs_equal_the_reference(
    load, make_request, reference_logits, model_dir: Path, adapter_dirs, adapter, pressure
) -> None:
    # 12 blocks are too few for two sequences of 7 blocks each. So one of them computes its prompt
    # twice, and must report it once.
    options = {"blocks": 12, "prefix_cache": False} if pressure else {}
    engine = load("adapter-1", step_tokens_max=40, sequences_max=4, **options)
    prompts = {1: PROMPT, 2: PROMPT[::-1], 3: PROMPT[:1]}
    for key, prompt in prompts.items():
        sampling = Sampling(logprobs=3, temperature=1.0, seed=key)
        more = {"prompt_logprobs": 2} if key != 2 else {}
        engine.add(make_request(key, prompt, 70, adapter, sampling=sampling, **more))
    tokens: dict[int, list[int]] = {key: [] for key in prompts}
    logprobs: dict[int, list] = {key: [] for key in prompts}
    scored: dict[int, list] = {key: [] for key in prompts}
    while engine.has_work:
        events = engine.step()
        for key, token in zip(events.keys, events.tokens, strict=True):
            tokens[key].append(token)
        for entry in events.logprobs:
            logprobs[entry.key].append(entry)
        for part in events.prompt_logprobs:
            assert part.first == len(scored[part.key]) + 1
            scored[part.key] += part.tokens
    assert (engine.load().preemptions > 0) == pressure
    for key, prompt in prompts.items():
        whole = prompt + tokens[key]
        wanted = log_softmax(reference_logits(model_dir, whole, adapter_dirs.get(adapter)))
        entries = (scored[key] if key != 2 else [None] * (len(prompt) - 1)) + logprobs[key]
        assert len(entries) == len(whole) - 1
        for position, entry in enumerate(entries):
            if entry is None:
                continue
            row, token = wanted[position], whole[position + 1]
            assert entry.logprob == pytest.approx(row[token], abs=2e-4)
            best = np.argsort(-row)[: 2 if position + 1 < len(prompt) else 3]
            assert [t for t, _ in entry.top] == best.tolist()
            assert [p for _, p in entry.top] == pytest.approx(row[best], abs=2e-4)


def test_a_grammar_constrains_one_row_of_a_mixed_batch(
    load, make_request, run_all, model_dir: Path
) -> None:
    choices = Grammar(GrammarKind.CHOICE, '["hello", "world"]')
    free = make_request(1, PROMPT, 5)
    bound = make_request(2, PROMPT, 20, "adapter-0", sampling=Sampling(grammar=choices))
    bound = replace(bound, ignore_eos=False)
    alone = run_all(load(), free).tokens[1]
    together = run_all(load("adapter-0"), free, bound).tokens
    assert together[1] == alone
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.decode(together[2]) in ("hello", "world")
    assert together[2][-1] in (0, 2), "and its end"


def test_the_engine_reports_its_features(load) -> None:
    can = load().capabilities
    assert can.has_grammars
    assert can.has_penalties
    assert can.has_drafts
    assert can.has_kv_transfer
    assert can.has_prompt_logprobs
    assert can.has_scores
    assert can.logprobs_max == 20
