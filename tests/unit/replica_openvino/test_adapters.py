"""Tests that an adapter in a mixed batch has the same effect as alone or merged."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from replica.engine.quantized import quantize_base
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode
from tests.support.random_models import write_random_adapter, write_random_model

_random = random.Random(5)
PROMPT = [_random.randrange(3, 470) for _ in range(70)]


@pytest.fixture(scope="module")
def names(adapter_dirs) -> list[str]:
    """The base and all adapters by name."""
    return ["", *adapter_dirs]


@pytest.fixture(scope="module")
def alone(load, names, make_request, run_all) -> dict[str, list[int]]:
    """The answer of each adapter to `PROMPT`, computed alone."""
    answers = {}
    for name in names:
        engine = load(*filter(None, [name]))
        answers[name] = run_all(engine, make_request(1, PROMPT, 12, name)).tokens[1]
    assert len({tuple(answer) for answer in answers.values()}) == len(names)
    return answers


@pytest.mark.parametrize(
    "options",
    [{}, {"base_graph": "off"}, {"adapter_slots": 2}, {"adapter_slots": 1, "step_tokens_max": 40}],
    ids=str,
)
def test_a_mixed_batch_answers_as_each_alone(
    load, names, alone, make_request, run_all, options: dict
) -> None:
    engine = load(*names[1:], sequences_max=16, **options)
    requests = [
        make_request(len(names) * turn + key, PROMPT, 12, name)
        for turn in range(2)
        for key, name in enumerate(names)
    ]
    tokens = run_all(engine, *requests).tokens
    for key, request_tokens in tokens.items():
        assert request_tokens == alone[names[key % len(names)]], key


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "int8"])
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "lora_alpha": 3}], ids=str)
def test_logits_equal_the_merged_weights(
    tmp_path: Path, architecture, changes, load, make_request, record_logits, reference_logits
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    if architecture == "int8":
        write_random_model(tmp_path / "f32", 1)
        quantize_base(tmp_path / "f32", base)
    else:
        write_random_model(base, 1, architecture=architecture)
    write_random_adapter(adapter, base, 1, rank=6, changes=changes)
    engine = load(directory=base)
    engine.put_adapter("merged", engine.read_adapter("merged", adapter))
    logits = record_logits(engine)
    engine.add(make_request(1, PROMPT, 3, "merged"))
    engine.add(make_request(2, PROMPT, 3))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while engine.has_work:
        events = engine.step()
        for key, token in zip(events.keys, events.tokens, strict=True):
            tokens[key].append(token)
    for row, (key, directory) in enumerate([(1, adapter), (2, None)]):
        wanted = reference_logits(base, PROMPT + tokens[key], directory)[len(PROMPT) - 1 : -1]
        got = [step[row] for step in logits]
        np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


def test_a_slot_keeps_nothing_of_the_adapter_before(
    load, names, alone, make_request, run_all
) -> None:
    engine = load(*names[1:], adapter_slots=1)
    order = ["adapter-3", "adapter-0", "adapter-2", "adapter-4"]  # ranks 16, 4, 12, 4
    for key, name in enumerate(order):
        assert run_all(engine, make_request(key, PROMPT, 12, name)).tokens[key] == alone[name]
    loads = {state.digest: state.loads for state in engine.adapters() if state.loads}
    assert loads == dict.fromkeys(order, 1)


def test_a_slot_keeps_nothing_of_projections_that_the_next_adapter_lacks(
    load, tmp_path, model_dir, names, make_request, run_all
) -> None:
    write_random_adapter(tmp_path, model_dir, 9, targets=["self_attn.v_proj"])
    answers = []
    for others in ([], ["adapter-3"]):
        engine = load(*others, adapter_slots=1)
        engine.put_adapter("v", engine.read_adapter("v", tmp_path))
        for key, name in enumerate(others):
            run_all(engine, make_request(key, PROMPT, 2, name))
        answers.append(run_all(engine, make_request(7, PROMPT, 12, "v")).tokens[7])
    assert answers[0] == answers[1]


def test_a_new_digest_never_sees_the_cache_of_the_old_one(
    load, alone, make_request, run_all
) -> None:
    engine = load("adapter-1", "adapter-2")
    first = run_all(engine, make_request(1, PROMPT, 12, "adapter-1"))
    again = run_all(engine, make_request(2, PROMPT, 12, "adapter-1"))
    engine.drop_adapter("adapter-1")
    replaced = run_all(engine, make_request(3, PROMPT, 12, "adapter-2"))
    assert first.tokens[1] == again.tokens[2] == alone["adapter-1"]
    assert (first.cached[1], again.cached[2], replaced.cached[3]) == (0, 64, 0)
    assert replaced.tokens[3] == alone["adapter-2"]


def test_a_first_adapter_is_read_while_the_batch_goes_on(
    load, adapter_dirs, alone, make_request, run_all
) -> None:
    engine = load()
    read = []

    def reader() -> None:
        read.append(engine.read_adapter("adapter-0", adapter_dirs["adapter-0"]))

    threads = [threading.Thread(target=reader) for _ in range(3)]
    engine.add(make_request(1, PROMPT, 12))
    tokens = list(engine.step().tokens)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tokens += engine.step().tokens
    for thread in threads:
        thread.join()
    tokens += run_all(engine).tokens.get(1, [])
    assert tokens == alone[""]
    assert len(read) == 3
    engine.put_adapter("adapter-0", read[0])
    answer = run_all(engine, make_request(2, PROMPT, 12, "adapter-0")).tokens[2]
    assert answer == alone["adapter-0"]


def test_an_engine_reports_its_capacity(load, adapter_dirs) -> None:
    limits = load(adapter_slots=3, adapter_rank=8).capabilities
    assert (limits.adapter_slots, limits.adapter_rank_max) == (3, 8)
    engine = load(adapter_rank=8)
    with pytest.raises(RefusedError, match="r is 12; this engine serves ranks 1 to 8") as caught:
        engine.read_adapter("adapter-2", adapter_dirs["adapter-2"])
    assert caught.value.code is ErrorCode.ADAPTER_INVALID
    assert load(adapter_slots=0).capabilities.adapter_rank_max == 0


def test_an_engine_without_slots_refuses_adapters(load, adapter_dirs, make_request) -> None:
    engine = load(adapter_slots=0)
    with pytest.raises(RefusedError, match="base alone") as caught:
        engine.read_adapter("adapter-0", adapter_dirs["adapter-0"])
    assert caught.value.code is ErrorCode.UNSUPPORTED_PARAMETER
    with pytest.raises(RefusedError):
        engine.add(make_request(1, PROMPT, 1, "adapter-0"))
