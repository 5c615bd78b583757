"""What sampling means survives the router: log probabilities, penalties, grammars, seeds.

A real router with a real engine (openvino, a tiny random base in f32) behind it; what a gateway
hears is compared with what the engine says when it is asked directly.
"""

from pathlib import Path

import pytest

from replica.drivers.openvino import load_openvino
from replica.engine.driver import Driver
from replica.engine.types import SequenceRequest
from sluice.kserve import HostStream
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.random_models import write_random_model
from tests.support.routers import logprob_rows

PROMPT = [20 + position * 7 % 400 for position in range(40)]
OUTPUT = 200
# Batches are composed otherwise on the way through the router: sums in f32 are not the same to the
# last bit, tokens are.
CLOSE = {"rel": 1e-3, "abs": 1e-3}
WAYS = {
    "greedy": engine.Sampling(logprobs=3),
    "alone": engine.Sampling(logprobs=0),
    "not asked": engine.Sampling(),
    "seeded": engine.Sampling(temperature=1.0, seed=11, logprobs=2),
    "penalties": engine.Sampling(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logprobs=1
    ),
    "grammar": engine.Sampling(
        logprobs=2,
        grammar=engine.Grammar(kind=engine.Grammar.KIND_REGEX, text=f"(ab|cd){{{OUTPUT}}}"),
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("router-logprobs") / "base"
    write_random_model(directory)
    return directory


def load(base: Path, **options) -> Driver:
    fixed = {"precision": "f32", "kv_precision": "f32", "threads": 1, "base_graph": "off"}
    size = {"sequences_max": 8, "step_tokens_max": 64, "context_tokens_max": 512, "blocks": 160}
    return load_openvino(base, "base", {**fixed, **size, **options})


async def ask(address: str) -> tuple[dict[str, list[int]], dict[str, list]]:
    """Return what the engine itself answers: tokens and rows of log probabilities."""
    names = list(WAYS)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list] = {name: [] for name in names}
    submit = engine.Submit(epoch=1)
    for number, sampling in enumerate(WAYS.values()):
        sequence = submit.sequences.add(
            id=number, prompt=PROMPT, output_tokens_max=OUTPUT, ignore_eos=True
        )
        sequence.cache_root = b"0" * 16
        sequence.sampling.CopyFrom(sampling)
    async with HostStream(address, "llm", silence_s=10.0) as stream:
        await stream.open(timeout_s=60)
        attach = engine.Attach(router_id="direct", epoch=1, credit_frames=1 << 20)
        await stream.send(engine.HostRequest(attach=attach))
        await stream.send(engine.HostRequest(submit=submit))
        left = len(names)
        async for frame in stream:
            step, start = frame.step, 0
            for sequence, count in zip(step.sequence, step.count, strict=True):
                tokens[names[sequence]] += step.token[start : start + count]
                start += count
            for sequence, row in logprob_rows(step.logprobs):
                logprobs[names[sequence]].append(row)
            left -= len(step.finished)
            if not left:
                break
    return tokens, logprobs


def assert_same(told: list, wanted: list) -> None:
    assert len(told) == len(wanted)
    for own, expected in zip(told, wanted, strict=True):
        assert own[0] == pytest.approx(expected[0], **CLOSE)
        assert own[1] == pytest.approx(expected[1], **CLOSE)


async def test_a_client_gets_the_engines_logprobs_also_over_broken_streams(
    base, hosts, start_router, connect
):
    host = await hosts(load(base))
    tokens, logprobs = await ask(host.address)
    assert {name: len(own) for name, own in logprobs.items()} == {
        name: OUTPUT * way.HasField("logprobs") for name, way in WAYS.items()
    }
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    handles = {}
    for name, sampling in WAYS.items():
        [handles[name]] = await gateway.submit(prompt=PROMPT, output=OUTPUT, sampling=sampling)
    for share in (10, 60, 120):
        await gateway.until(
            lambda share=share: all(
                len(gateway.tokens.get(handle, ())) >= share for handle in handles.values()
            )
        )
        host.cut()
    await gateway.until_over(list(handles.values()))
    for name, handle in handles.items():
        assert gateway.outcomes[handle].kind == wire.OUTCOME_KIND_LENGTH
        assert gateway.tokens[handle] == tokens[name], name
        assert_same(gateway.logprobs.get(handle, []), logprobs[name])


async def test_an_interrupted_answer_is_the_same(base, hosts, start_router, connect):
    host = await hosts(load(base, sequences_max=1))
    tokens, logprobs = await ask(host.address)
    router = await start_router(host.address, ttft_base_s=0.0)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    for name in ("seeded", "penalties", "grammar"):
        [handle] = await gateway.submit(
            prompt=PROMPT, output=OUTPUT, is_preemptible=True, sampling=WAYS[name]
        )
        await gateway.until(lambda handle=handle: len(gateway.tokens.get(handle, ())) >= 20)
        urgent = await gateway.submit(output=5, tier_priority=9)
        await gateway.until_over(urgent)
        assert handle not in gateway.outcomes, "it was not interrupted"
        await gateway.until_over([handle])
        assert gateway.tokens[handle] == tokens[name], name
        assert_same(gateway.logprobs[handle], logprobs[name])


async def test_a_score_is_the_one_of_the_engine(base, hosts, start_router, connect):
    """The end of a prompt is scored, and nothing else; who asks for none gets none."""
    driver = load(base)
    request = SequenceRequest(1, PROMPT, 1, prompt_logprobs=0)
    driver.add(request)
    told: list[float] = []
    while driver.has_work:
        told += [it.logprob for part in driver.step().prompt_logprobs for it in part.tokens]
    host = await hosts(load(base))
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    scored = [
        (await gateway.submit(prompt=PROMPT, output=1, scored_tokens=count))[0]
        for count in (5, len(PROMPT) - 1, 0)
    ]
    await gateway.until_over(scored)
    last, most, none = (gateway.outcomes[handle] for handle in scored)
    assert last.score.logprob == pytest.approx(sum(told[-5:]) / 5, **CLOSE)
    assert most.score.logprob == pytest.approx(sum(told) / len(told), **CLOSE)
    assert last.score.entropy > 0
    assert not none.HasField("score")
