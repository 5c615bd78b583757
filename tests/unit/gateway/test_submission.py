"""From a body to what routers are told about each answer."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.bases.assets import EncodedPrompt, load_base
from gateway.bodies.parsing import parse
from gateway.directory import Principal
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.endpoints.completions import CompletionTask
from gateway.endpoints.submission import derived_seed, generation_specs
from gateway.resolved import ResolvedModel
from gateway.server.identity import CallerIdentity
from sluice.token_ids import unpacked_ids
from sluice.wire.control.v1 import control_pb2 as control

ASSETS = load_base(Path(__file__).resolve().parents[3] / "model_repo" / "default")
PRINCIPAL = Principal(
    key=control.ApiKey(), tenant=control.Tenant(id="t"), tier=control.Tier(id="f", priority=3)
)
RESOLVED = ResolvedModel(
    name="m",
    model=control.Model(id="m", pool_id="p"),
    context_tokens_max=40_960,
    tenant_id="t",
    cache_root=b"r",
    generates_text=True,
)


def specs_of(
    body: bytes, first_index: int = 0, prompt: EncodedPrompt | None = None
) -> list[GenerationSpec]:
    prompt = prompt or asyncio.run(ASSETS.encode_text("a prompt of some words", b"r"))
    return generation_specs(
        parse(CompletionTask, body),
        identity=CallerIdentity("u", "req", "t", "00-t-u-01"),
        principal=PRINCIPAL,
        resolved=RESOLVED,
        assets=ASSETS,
        prompt=prompt,
        first_index=first_index,
    )


def test_answers_share_large_parts() -> None:
    first, *others = specs_of(b'{"model":"m","prompt":"x","n":8}')
    assert len(others) == 7
    for other in others:
        assert other.prompt is first.prompt
        assert other.block_hashes is first.block_hashes
    assert first.prompt.itemsize == 4, "a list takes nine times that"


@pytest.mark.parametrize("seed", [0, 5, (1 << 64) - 2, -1])
@pytest.mark.parametrize("first_index", [0, 6])
def test_answers_have_seeds_and_names_of_their_own(seed: int, first_index: int) -> None:
    body = b'{"model":"m","prompt":"x","n":3,"seed":%d}' % seed
    specs = specs_of(body, first_index)
    places = range(first_index, first_index + 3)
    own = seed % (1 << 64)
    wanted = [derived_seed(own, i) if i else own for i in places]
    assert [it.sampling.seed for it in specs] == wanted
    assert [it.choice for it in specs] == list(places)
    assert [it.is_begun for it in specs] == [False, True, True]
    assert [it.request_id for it in specs] == [f"req-{i}" if i else "req" for i in places]


def test_sweeps_over_seeds_share_no_answer() -> None:
    seeds = [
        spec.sampling.seed
        for seed in range(200)
        for spec in specs_of(b'{"model":"m","prompt":"x","n":8,"seed":%d}' % seed, 0)
    ]
    assert len(set(seeds)) == 1600


def test_without_a_seed_the_engine_chooses() -> None:
    assert not any(
        it.sampling.HasField("seed") for it in specs_of(b'{"model":"m","prompt":"x","n":3}')
    )


@pytest.mark.parametrize("emitted", [0, 3])
@pytest.mark.parametrize("tokens", [7, 20_000])
def test_a_prompt_reaches_routers_of_this_and_of_the_last_release(
    tokens: int, emitted: int
) -> None:
    ids = [number * 7919 % 150_000 for number in range(tokens)]
    prompt = asyncio.run(ASSETS.hash_ids(ids, b"r"))
    [spec] = specs_of(b'{"model":"m","prompt":"x"}', prompt=prompt)
    generation = generation_of(spec._replace(traceparent=""))
    generation.emitted.extend(range(emitted))
    message = generation.submit_message(1, "cell", 10)
    old = generation.submit_message(1, "cell", 10, reads_prompt_ids=False)
    assert list(unpacked_ids(message.prompt_ids)) == list(old.prompt) == [*ids, *range(emitted)]
    assert not message.prompt
    assert not old.prompt_ids
    assert generation.prompt_tokens == tokens + emitted


def generation_of(spec: GenerationSpec) -> WholeGeneration:
    return WholeGeneration(spec)


@pytest.mark.parametrize(
    ("tier", "body", "told_ms"),
    [
        ({}, b"", 0),
        ({"ttft_deadline_ms": 1_500}, b"", 1_500),
        ({"is_preemptible": True}, b"", 600_000),
        ({"is_preemptible": True, "ttft_deadline_ms": 900_000}, b"", 900_000),
        ({"is_preemptible": True}, b', "deadline_ms": 5', 0),
    ],
    ids=str,
)
def test_a_batch_tier_without_a_deadline_may_wait_for_the_longest(
    monkeypatch: pytest.MonkeyPatch, tier: dict[str, int], body: bytes, told_ms: int
) -> None:
    monkeypatch.setitem(globals(), "PRINCIPAL", replace(PRINCIPAL, tier=control.Tier(**tier)))
    (spec,) = specs_of(b'{"model": "m", "prompt": "x"' + body + b"}")
    assert spec.admission_ms == told_ms
