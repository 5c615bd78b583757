"""All of the engine's wire through a real Triton and the OpenVINO engine: what each field promises
must be seen in the answers."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from replica.agent.triton import MODEL
from sluice.artifacts import import_directory
from sluice.errors import ErrorCode, FailedError
from sluice.hashing import block_hashes, cache_root
from sluice.kserve import call_host
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_adapter

pytestmark = pytest.mark.real

WAIT_S = 60.0
PROMPT = [5, 6, 7, 250, 300, 41] * 16  # three blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(start_triton) -> AsyncIterator:
    served = await start_triton("openvino")
    yield served
    assert served.child.is_running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(start_triton) -> AsyncIterator:
    """A second engine of the same base, made when the first test wants it."""
    served = await start_triton("openvino")
    yield served
    assert served.child.is_running


@pytest.fixture(scope="module")
def adapters(served, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of two adapters that lie in the node's artifact folder."""
    digests = []
    for seed in (1, 2):
        directory = tmp_path_factory.mktemp("adapter") / "lora"
        write_random_adapter(directory, served.directory, seed)
        digests.append(import_directory(directory, served.artifacts))
    return digests


async def answer(served, **kind) -> wire.HostFrame:
    request = wire.HostRequest(**kind)
    return await call_host(served.address, MODEL, request, timeout_s=WAIT_S)


async def test_logprobs_rank_the_chosen_token(served, router_of, make_sequence) -> None:
    async with router_of(served) as router:
        assert router.attached.limits.logprobs_max >= 3
        wanted = wire.Sampling(logprobs=3)
        await router.finish(
            make_sequence(1, PROMPT, 6, sampling=wanted, prompt_logprobs=1),
            make_sequence(2, PROMPT, 6),
        )
    columns = [step.logprobs for step in router.steps]
    assert {sequence for part in columns for sequence in part.sequence} == {1}
    logprobs = list(itertools.chain(*(part.logprob for part in columns)))
    tops = list(itertools.chain(*(part.top_token for part in columns)))
    assert len(logprobs) == 6
    assert len(tops) == 18
    assert all(value < 0 for value in logprobs)
    assert tops[::3] == router.tokens[1] == router.tokens[2]  # greedy: the best is the chosen one
    parts = [part for step in router.steps for part in step.prompt_logprobs]
    assert parts[0].first == 1
    assert sum(len(part.logprob) for part in parts) == len(PROMPT) - 1


async def test_forks_answer_by_their_seeds_and_compute_the_prompt_once(
    served, router_of, make_sequence
) -> None:
    prompt = [number % 400 + 20 for number in range(320)]
    sampling = wire.Sampling(temperature=1.5, seed=1)
    forks = [wire.Fork(id=2, seed=2), wire.Fork(id=3, seed=1)]
    async with router_of(served) as router:
        await router.finish(make_sequence(1, prompt, 8, sampling=sampling, forks=forks))
        assert router.tokens[1] == router.tokens[3]
        assert router.tokens[1] != router.tokens[2]
        assert {len(tokens) for tokens in router.tokens.values()} == {8}
        alone = wire.Sampling(temperature=1.5, seed=2)
        await router.finish(make_sequence(9, prompt, 8, sampling=alone))
        assert router.tokens[9] == router.tokens[2]


async def test_an_answer_obeys_its_grammar_bias_and_drafts_change_nothing(
    served, router_of, make_sequence
) -> None:
    choice = wire.Grammar(kind=wire.Grammar.KIND_CHOICE, text=json.dumps(["hello", "world"]))
    async with router_of(served) as router:
        await router.finish(
            make_sequence(1, PROMPT, 12, draft_tokens_max=4),
            make_sequence(2, PROMPT, 12),
            make_sequence(3, PROMPT, 12, ignore_eos=False, sampling=wire.Sampling(grammar=choice)),
            make_sequence(
                4, PROMPT, 4, sampling=wire.Sampling(bias_token=[77], logit_bias=[100.0])
            ),
            make_sequence(
                5, PROMPT, 4, sampling=wire.Sampling(grammar=wire.Grammar(kind=2, text="{"))
            ),
        )
    assert router.tokens[1] == router.tokens[2]
    assert router.finished[3].reason == wire.FINISH_REASON_STOP
    assert router.tokens[4] == [77] * 4
    assert router.finished[5].reason == wire.FINISH_REASON_REFUSED
    assert router.finished[5].message


async def test_adapters_are_loaded_by_digest(served, adapters, router_of, make_sequence) -> None:
    first, second = adapters
    async with router_of(served) as router:
        assert router.attached.limits.adapter_slots > 0
        assert router.attached.state.adapters_changed
        await router.finish(
            make_sequence(1, PROMPT, 8),
            make_sequence(2, PROMPT, 8, adapter_digest=first),
            make_sequence(3, PROMPT, 8, adapter_digest=second),
            make_sequence(4, PROMPT, 8, adapter_digest="0" * 64),
            make_sequence(5, PROMPT, 8, adapter_digest=first),
        )
        assert router.tokens[2] == router.tokens[5]
        answers = {tuple(router.tokens[number]) for number in (1, 2, 3)}
        assert len(answers) == 3
        # No agent runs here to say that nobody has it; another node may.
        assert router.finished[4].code == ErrorCode.ENGINE_BUSY
        load_us = {it.sequence: it.load_us for step in router.steps for it in step.admitted}
        assert min(load_us[2], load_us[3]) > 0  # they were read; 5 may have come after that
        told = [step.state for step in router.steps if step.state.adapters_changed]
        assert set(told[-1].adapters_resident) == {first, second}
        listed = (await answer(served, adapters=wire.Adapters())).adapters.adapters
        assert {info.digest: info.output_tokens for info in listed} == {first: 16, second: 8}
        assert all(info.is_in_slot and info.memory_bytes for info in listed)
        await answer(served, adapters=wire.Adapters(unload=[second]))
        await router.read_until(lambda r: list(r.steps[-1].state.adapters_resident) == [first])


async def test_a_cut_stream_goes_on_where_it_was(served, router_of, make_sequence) -> None:
    count = 200
    async with router_of(served) as router:
        await router.finish(make_sequence(1, PROMPT, count), make_sequence(2, PROMPT[:40], count))
        whole = router.tokens
    cut = await router_of(served, "cut").__aenter__()
    await cut.submit(make_sequence(1, PROMPT, count), make_sequence(2, PROMPT[:40], count))
    await cut.read_until(lambda r: {1, 2} <= r.tokens.keys())
    await cut.stream.close(timeout_s=0.0)
    async with router_of(served, "cut", resumes=cut.epoch) as resumed:
        outputs = {entry.sequence: list(entry.output) for entry in resumed.attached.resumed}
        assert outputs.keys() == {1, 2}
        for number, tokens in cut.tokens.items():
            assert outputs[number][: len(tokens)] == tokens
        await resumed.read_until(lambda r: {1, 2} <= r.finished.keys())
        for number, tokens in outputs.items():
            assert tokens + resumed.tokens.get(number, []) == whole[number]
        assert resumed.steps[0].kv_events.reset


async def test_two_routers_use_the_same_ids_at_the_same_time(
    served, router_of, make_sequence
) -> None:
    async with router_of(served, "one") as one, router_of(served, "two") as two:
        await asyncio.gather(
            one.finish(*(make_sequence(n, [n + 20] * 40, 30) for n in range(8))),
            two.finish(*(make_sequence(n, [n + 60] * 40, 20) for n in range(8))),
        )
        assert {len(tokens) for tokens in one.tokens.values()} == {30}
        assert {len(tokens) for tokens in two.tokens.values()} == {20}
        await two.finish(make_sequence(100, [20] * 40, 30))
        assert two.tokens[100] == one.tokens[0]


async def test_blocks_of_one_engine_serve_another(served, other, router_of, make_sequence) -> None:
    prompt = [number % 300 + 100 for number in range(331)]
    root = cache_root(served.digest, "", b"tenant")
    names = block_hashes(prompt, root, len(prompt) // 32)
    async with router_of(served) as router:
        await router.finish(make_sequence(1, prompt, 10, cache_root=root))
    exported = (await answer(served, export_kv=wire.Export(hashes=b"".join(names)))).exported
    assert exported.hashes == b"".join(names)
    async with router_of(other) as router:
        taken = await answer(other, import_kv=wire.Import(blocks=exported))
        assert taken.imported.blocks == len(names)
        await router.read_until(
            lambda r: any(set(names) <= hashes_of(step.kv_events.stored) for step in r.steps)
        )
        await router.finish(make_sequence(1, prompt, 10, cache_root=root, pinned_blocks=2))
        assert router.admitted[1].cached_tokens == 32 * len(names)
        assert router.steps[-1].state.kv_blocks_pinned == 2
        answered_there = router.tokens[1]
    async with router_of(served) as router:
        await router.finish(make_sequence(1, prompt, 10, cache_root=root))
        assert router.tokens[1] == answered_there
    exported.data = exported.data[:-1] + bytes([exported.data[-1] ^ 1])
    with pytest.raises(FailedError, match="checksum") as caught:
        await answer(other, import_kv=wire.Import(blocks=exported))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    exported.base_digest = "f" * 64
    with pytest.raises(FailedError, match="serves") as caught:
        await answer(other, import_kv=wire.Import(blocks=exported))
    assert caught.value.code is ErrorCode.CONFLICT


def hashes_of(data: bytes) -> set[bytes]:
    return {data[start : start + 16] for start in range(0, len(data), 16)}


async def test_every_metric_is_on_tritons_port(served, adapters, router_of, make_sequence) -> None:
    names = set(re.findall(r"^\| `((?:nv|llm)_\w+)` ", metrics_of_engines(), re.MULTILINE))
    assert len(names) > 15
    async with router_of(served) as router:
        await router.finish(make_sequence(1, PROMPT, 5, adapter_digest=adapters[0]))
    with pytest.raises(FailedError):
        await answer(served, import_kv=wire.Import())
    pattern = re.compile(
        rf'^llm_adapter_tokens_total\{{adapter="{adapters[0][:12]}",kind="output".*\}} ([0-9.]+)$',
        re.MULTILINE,
    )
    async with httpx.AsyncClient(timeout=WAIT_S) as client, asyncio.timeout(WAIT_S):
        text = ""
        while not ((found := pattern.search(text)) and "llm_kv_imports_refused_total{" in text):
            text = (await client.get(served.metrics_url)).text
            await asyncio.sleep(0.1)
    assert float(found[1]) >= 5
    assert names <= set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    assert re.search(r'llm_step_seconds_bucket\{.*le="0.1"\} [1-9]', text)
    assert re.search(r"nv_llm_output_token_len_count\{.*total_output_tokens.*\} [1-9]", text)
    for category in ("active", "max", "scheduled", "context", "waiting"):
        assert f'request_type="{category}"' in text


def metrics_of_engines() -> str:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    return page.partition("## Engine")[2]
