import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from replica.drivers.openvino import (
    OpenvinoOptions,
    choose_precision,
    choose_threads,
    has_base_graph,
    load_openvino,
)
from replica.drivers.options import OptionsError
from replica.engine.artifact import ArtifactError
from replica.engine.graph import build_graph, read_base
from replica.engine.types import Finish, Sampling, SequenceRequest

EXACT = {"precision": "f32"}  # deterministic: f32 compute and f32 KV


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Callable[[list[int], int], list[int]]:
    """Decode greedily with the stateful graph, without blocks, batch and prefix cache."""
    graph = build_graph(read_base(model_dir))
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties["INFERENCE_NUM_THREADS"] = "1"
    run = ov.Core().compile_model(graph, "CPU", properties).create_infer_request()

    def generate(prompt: list[int], count: int) -> list[int]:
        run.reset_state()
        tokens, done = list(prompt), 0
        for _ in range(count):
            new = tokens[done:]
            run.infer(
                {
                    "input_ids": np.array([new], np.int64),
                    "attention_mask": np.ones((1, len(tokens)), np.int64),
                    "position_ids": np.arange(done, len(tokens), dtype=np.int64)[None],
                    "beam_idx": np.zeros(1, np.int32),
                }
            )
            done = len(tokens)
            tokens.append(int(run.get_tensor("logits").data[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate


def jobs_under_pressure(seed: int) -> list[tuple[list[int], int, bool]]:
    """Return (prompt, new tokens, is cancelled) of sequences, many with common beginnings."""
    rnd = random.Random(seed)
    prefixes = [[rnd.randrange(3, 470) for _ in range(n)] for n in (40, 100, 200)]
    return [
        (
            rnd.choice(prefixes)[: rnd.randint(1, 200)]
            + [rnd.randrange(3, 470) for _ in range(rnd.randint(1, 50))],
            rnd.randint(1, 40),
            rnd.random() < 0.15,
        )
        for _ in range(40)
    ]


def test_same_tokens_as_without_pages_batch_and_cache(model_dir: Path, reference) -> None:
    # 20 blocks cause evictions and preemptions. 48 tokens per step cause chunks of prompts.
    options = {**EXACT, "blocks": 20, "step_tokens_max": 48, "sequences_max": 8}
    engine = load_openvino(model_dir, "base", options)
    rnd = random.Random(1)
    jobs = jobs_under_pressure(1)
    tokens: dict[int, list[int]] = {key: [] for key in range(len(jobs))}
    ended: dict[int, Finish] = {}
    added = steps = 0
    while added < len(jobs) or engine.has_work:
        steps += 1
        assert steps < 5000, engine.load()
        if added < len(jobs) and rnd.random() < 0.6:
            prompt, count, _ = jobs[added]
            engine.add(SequenceRequest(added, prompt, count, ignore_eos=True))
            added += 1
        for key in range(added):
            if jobs[key][2] and len(tokens[key]) >= 3:
                engine.cancel(key)
        events = engine.step()
        for key, token in zip(events.keys, events.tokens, strict=True):
            tokens[key].append(token)
        ended.update({event.key: event.reason for event in events.finished})
        engine.scheduler.pool.check()
    load = engine.load()
    assert load.preemptions > 0
    assert load.cached_tokens > 0
    assert engine.scheduler.pool.evictions > 0
    assert load.kv_blocks_used == 0
    for key, (prompt, count, _) in enumerate(jobs):
        if ended[key] is not Finish.CANCELLED:
            assert len(tokens[key]) == count
        assert tokens[key] == reference(prompt, len(tokens[key])), key


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_resume(
    model_dir: Path, run_all
) -> None:
    def generate(*requests: SequenceRequest) -> dict[int, list[int]]:
        return run_all(load_openvino(model_dir, "base", EXACT), *requests).tokens

    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1234)
    prompt = [10, 20, 30, 40]
    wanted = SequenceRequest(1, prompt, 30, sampling=sampling, ignore_eos=True)
    others = [
        SequenceRequest(key, [key] * 30, 20, sampling=Sampling(temperature=1.0, seed=key))
        for key in range(2, 9)
    ]
    alone = generate(wanted)[1]
    assert generate(*others[:4], wanted, *others[4:])[1] == alone
    rest = SequenceRequest(1, prompt + alone[:10], 20, sampling=sampling, ignore_eos=True)
    assert generate(rest)[1] == alone[10:]
    other = SequenceRequest(1, prompt, 30, sampling=Sampling(temperature=0.8, seed=4321))
    assert generate(other)[1] != alone


@pytest.mark.parametrize("options", [{}, {"precision": "f32", "threads": 2}])
def test_other_precisions_and_threads_serve(model_dir: Path, run_all, options: dict) -> None:
    engine = load_openvino(model_dir, "base", options)
    requests = [SequenceRequest(key, [key + 3] * 70, 40, ignore_eos=True) for key in range(5)]
    tokens = run_all(engine, *requests).tokens
    assert [len(tokens[key]) for key in range(5)] == [40] * 5


def test_a_checkpoint_of_another_architecture_is_refused(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ArtifactError, match="gpt2"):
        load_openvino(tmp_path, "base", EXACT)


@pytest.mark.parametrize(
    ("flags", "options", "wanted"),
    [
        ({"avx2"}, {}, ("f32", "f32")),
        ({"avx2", "avx512_bf16"}, {}, ("bf16", "u8")),
        ({"amx_bf16"}, {}, ("bf16", "u8")),
        ({"amx_bf16"}, {"precision": "f32"}, ("f32", "f32")),
        ({"avx2"}, {"kv_precision": "u8"}, ("f32", "u8")),
    ],
)
def test_precision_follows_the_cpu(flags: set[str], options: dict, wanted: tuple[str, str]) -> None:
    assert choose_precision(OpenvinoOptions(**options), frozenset(flags)) == wanted


@pytest.mark.parametrize(
    "options", [{"precision": "f16"}, {"precision": "bf16", "kv_precision": "f32"}]
)
def test_impossible_precisions_are_refused(options: dict) -> None:
    with pytest.raises(OptionsError, match="precision"):
        choose_precision(OpenvinoOptions(**options), frozenset())


def test_a_bf16_pool_is_refused_where_the_cpu_cannot_read_it() -> None:
    options = OpenvinoOptions(precision="bf16", kv_precision="bf16")
    with pytest.raises(OptionsError, match="use u8"):
        choose_precision(options, frozenset({"avx2"}))
    assert choose_precision(options, frozenset({"avx2", "avx512f"})) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("name", "value"), [("adapter_slots", -1), ("adapter_rank", 0), ("base_graph", "yes")]
)
def test_impossible_options_are_refused(model_dir: Path, name: str, value: object) -> None:
    with pytest.raises(OptionsError, match=name):
        load_openvino(model_dir, "base", {name: value})


def test_threads_follow_the_size_of_the_base_and_of_the_machine() -> None:
    assert choose_threads(0, 1_000_000, 16) == 1
    assert choose_threads(0, 100_000_000, 16) == 4
    assert choose_threads(0, 8_000_000_000, 16) == 16
    assert choose_threads(3, 1_000_000, 2) == 3


def test_large_bases_and_bases_alone_have_one_graph() -> None:
    assert has_base_graph("auto", 8, 1 << 20)
    assert not has_base_graph("auto", 8, 1 << 30)
    assert has_base_graph("on", 8, 1 << 30)
    assert not has_base_graph("off", 8, 1 << 20)
    assert has_base_graph("off", 0, 1 << 20)  # without slots there is only one graph


def test_a_failed_graph_call_ends_its_sequences_and_nothing_else(
    load, make_request, run_all
) -> None:
    engine = load()
    wanted = run_all(engine, make_request(1, [5, 6, 7], 4)).tokens[1]
    backend = engine._backend
    broken, backend._base_request = backend._base_request, BrokenRequest()
    failed = run_all(engine, make_request(2, [5, 6, 7], 4))
    assert failed.finished[2].reason is Finish.FAILED
    assert failed.finished[2].code == "engine_failed"
    assert "the graph call failed: out of order" in failed.finished[2].message
    backend._base_request = broken
    assert run_all(engine, make_request(3, [5, 6, 7], 4)).tokens[3] == wanted
    engine.scheduler.pool.check()


class BrokenRequest:
    def set_tensor(self, name: str, tensor: ov.Tensor) -> None:
        assert name
        assert tensor.size

    def start_async(self) -> None:
        raise RuntimeError("out of order")


def test_drafts_are_an_option_of_the_pool_and_of_the_base(
    model_dir: Path, tmp_path: Path, run_all, make_request
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    generation = base / "generation_config.json"
    own = json.loads(generation.read_text()) if generation.exists() else {}
    prompt = [5, 6, 7] * 20
    counts = {}
    for recommended, given in ((0, -1), (0, 8), (6, -1), (6, 0), (99, -1)):
        generation.write_text(json.dumps(own | {"prompt_lookup_num_tokens": recommended}))
        engine = load_openvino(base, "base", {**EXACT, "draft_tokens": str(given)})
        plain = run_all(engine, make_request(1, prompt, 60)).tokens[1]
        counts[recommended, given] = engine.load().draft_tokens
        assert counts.setdefault("answer", plain) == plain
    assert counts[0, -1] == counts[6, 0] == 0
    assert min(counts[0, 8], counts[6, -1], counts[99, -1]) > 0
    for wrong in (-2, 17):
        with pytest.raises(OptionsError, match="draft_tokens"):
            load_openvino(base, "base", {**EXACT, "draft_tokens": wrong})
    generation.write_text(json.dumps(own | {"prompt_lookup_num_tokens": "many"}))
    with pytest.raises(ArtifactError, match="prompt_lookup_num_tokens"):
        load_openvino(base, "base", EXACT)
