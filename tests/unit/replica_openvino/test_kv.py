"""Tests the KV pool in transfers, forks and drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from replica.drivers.openvino import read_cpu_flags
from replica.engine.speculation import PromptLookup
from replica.engine.types import Fork, KvBlocks, RefusedError, Sampling
from sluice.hashing import block_hashes, cache_root

_random = random.Random(11)
PROMPT = [_random.randrange(3, 470) for _ in range(150)]
KINDS = [
    {"precision": "f32", "kv_precision": "f32"},
    {"precision": "f32", "kv_precision": "u8"},
    {"precision": "bf16", "kv_precision": "u8"},
]
if "avx512f" in read_cpu_flags():  # without AVX-512 the driver refuses a bf16 pool
    KINDS.append({"precision": "bf16", "kv_precision": "bf16"})
SAMPLING = Sampling(temperature=1.0, seed=3)


def hashes_of(prompt: list[int], adapter: str = "") -> list[bytes]:
    return block_hashes(prompt, cache_root("base", adapter, b""), len(prompt) // 32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_another_engine_goes_on_with_exported_blocks(load, make_request, run_all, kind) -> None:
    here, there = load(**kind), load(**kind)
    computed = run_all(here, make_request(1, PROMPT, 8))
    again = run_all(here, make_request(2, PROMPT, 8))
    blocks = here.export_blocks(hashes_of(PROMPT))
    assert len(blocks.hashes) == 4
    assert there.import_blocks(blocks) == 4
    imported = run_all(there, make_request(1, PROMPT, 8))
    assert (computed.cached[1], again.cached[2], imported.cached[1]) == (0, 128, 128)
    assert imported.tokens[1] == again.tokens[2]
    if kind["precision"] == "f32" and kind["kv_precision"] == "f32":
        assert imported.tokens[1] == computed.tokens[1]
    assert there.export_blocks(hashes_of(PROMPT)) == blocks
    there.scheduler.pool.check()


def test_blocks_of_an_adapter_are_transferred_under_its_own_root(
    load, make_request, run_all
) -> None:
    here, there = load("adapter-1"), load("adapter-1")
    computed = run_all(here, make_request(1, PROMPT, 8, "adapter-1"))
    assert not here.export_blocks(hashes_of(PROMPT)).hashes
    there.import_blocks(here.export_blocks(hashes_of(PROMPT, "adapter-1")))
    imported = run_all(there, make_request(1, PROMPT, 8, "adapter-1"), make_request(2, PROMPT, 8))
    assert imported.tokens[1] == computed.tokens[1]
    assert (imported.cached[1], imported.cached[2]) == (128, 0)


def test_layouts_tell_engines_apart(load) -> None:
    layouts = {load(**kind).export_blocks([]).layout for kind in KINDS}
    # The layout does not depend on the precision of the computation.
    assert len(layouts) == len({kind["kv_precision"] for kind in KINDS})
    (u8,) = (layout for layout in layouts if "u8" in layout)
    assert u8.endswith("32 tokens, 2 layers of keys u8[2, 40, 32] values u8[2, 32, 40]")


def test_blocks_that_do_not_fit_are_refused(load, make_request, run_all) -> None:
    engine = load()
    run_all(engine, make_request(1, PROMPT, 1))
    blocks = engine.export_blocks(hashes_of(PROMPT))
    other = load(kv_precision="u8")
    with pytest.raises(RefusedError, match="u8"):
        other.import_blocks(blocks)
    cut = KvBlocks(blocks.layout, blocks.hashes, tuple(data[:-4] for data in blocks.data))
    with pytest.raises(RefusedError, match="this engine's have 32768"):
        load().import_blocks(cut)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("prompt_tokens", [1, 32, 45, 150])
def test_forks_answer_as_requests_of_their_own(
    load, make_request, run_all, kind, prompt_tokens
) -> None:
    prompt = PROMPT[:prompt_tokens]
    forks = tuple(Fork(key, seed) for key, seed in ((2, 10), (3, 11), (4, 3)))
    options = {**kind, "prefix_cache": False}
    together = run_all(
        load(**options), make_request(1, prompt, 40, sampling=SAMPLING, forks=forks)
    ).tokens
    apart = load(**options)
    for key, seed in ((1, 3), (2, 10), (3, 11), (4, 3)):
        own = make_request(key, prompt, 40, sampling=replace(SAMPLING, seed=seed))
        assert run_all(apart, own).tokens[key] == together[key], key
    assert together[1] == together[4] != together[2] != together[3]


def test_copied_blocks_hold_the_same_bytes(load, make_request) -> None:
    for kind in KINDS:
        engine = load(**kind)
        engine.add(make_request(1, PROMPT, 2, forks=(Fork(2, 5), Fork(3, 6))))
        engine.step()
        sequences = engine.scheduler._decoding
        contents = [engine._backend.read_blocks(sequence.blocks) for sequence in sequences]
        assert len(sequences) == 3
        assert len({sequence.blocks[-1] for sequence in sequences}) == 3
        assert contents[0] == contents[1] == contents[2]
        assert len(set(contents[0])) == 5


@pytest.fixture
def foresee(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[int]], float], None]:
    """Draft the given answers with mistakes, because a random model has no repetitions."""

    def patch(whole: dict[int, list[int]], mistakes: float) -> None:
        rnd = random.Random(1)

        def propose(_, tokens: Sequence[int], count_max: int) -> list[int]:
            for answer in whole.values():
                if answer[: len(tokens)] == list(tokens):
                    draft = answer[len(tokens) : len(tokens) + min(count_max, 5)]
                    return [3 if rnd.random() < mistakes else token for token in draft]
            return []

        monkeypatch.setattr(PromptLookup, "propose", propose)

    return patch


@pytest.mark.parametrize("adapter", ["", "adapter-2"])
@pytest.mark.parametrize("mistakes", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING], ids=["greedy", "sampled"])
def test_drafts_do_not_change_the_answer(
    load, make_request, run_all, foresee, adapter, mistakes, sampling
) -> None:
    engine = load("adapter-2")
    prompts = [PROMPT[:20], PROMPT[:90], PROMPT[40:80]]
    plain = [make_request(key, p, 40, adapter, sampling=sampling) for key, p in enumerate(prompts)]
    wanted = run_all(engine, *plain).tokens
    foresee({key: prompts[key] + wanted[key] for key in wanted}, mistakes)
    drafted = [replace(request, draft_tokens_max=5) for request in plain]
    assert run_all(engine, *drafted).tokens == wanted
    load_now = engine.load()
    assert load_now.draft_tokens > 60
    assert (load_now.accepted_tokens > 50) == (mistakes < 1)
    engine.scheduler.pool.check()
