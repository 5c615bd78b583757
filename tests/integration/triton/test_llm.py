"""The model `llm` in a real Triton: step frames over real gRPC, with both engines."""

import asyncio
import re
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL, TritonLauncher
from replica.drivers.openvino import load_openvino
from replica.engine.types import SequenceRequest
from sluice.addresses import host_and_port
from sluice.artifacts import import_directory
from sluice.channels import engine_header
from sluice.errors import ErrorCode, FailedError
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES, chained_hashes
from sluice.kserve import probe
from sluice.prompt_spans import PROMPT_SPANS, SPAN_TOKENS, span_names
from sluice.token_ids import packed_ids
from sluice.triton import messages
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_model

pytestmark = pytest.mark.real

WAIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["openvino", "sim"])
async def served(request: pytest.FixtureRequest, start_triton) -> AsyncIterator:
    served = await start_triton(request.param)
    yield served
    assert served.child.is_running
    await served.child.stop()


async def test_sequences_stream_to_their_ends(served, router_of, make_sequence) -> None:
    prompts = {number: [number + 3, 5, 6, 7, 250, 300] * 8 for number in range(12)}
    async with router_of(served) as router:
        assert router.attached.limits.base_digest == served.digest
        assert router.attached.limits.engine == served.engine
        await router.submit(*(make_sequence(n, prompt, 20) for n, prompt in prompts.items()))
        await router.read_until(lambda r: len(r.finished) == 12)
        assert {f.reason for f in router.finished.values()} == {wire.FINISH_REASON_LENGTH}
        assert {len(tokens) for tokens in router.tokens.values()} == {20}
        assert router.admitted.keys() == prompts.keys()
        await router.read_until(lambda r: not r.steps[-1].sequence)
        assert router.steps[-1].state.kv_blocks_used == 0
        await router.submit(make_sequence(100, prompts[3], 5))
        await router.read_until(lambda r: 100 in r.finished)
        assert router.admitted[100].cached_tokens == 32
        assert router.tokens[100] == router.tokens[3][:5]
    if served.engine == "openvino":
        direct = load_openvino(served.directory, served.digest, {"precision": "f32"})
        for number, prompt in prompts.items():
            direct.add(SequenceRequest(number, prompt, 20, ignore_eos=True))
        wanted: dict[int, list[int]] = {number: [] for number in prompts}
        while direct.has_work:
            events = direct.step()
            for key, token in zip(events.keys, events.tokens, strict=True):
                wanted[key].append(token)
        assert {number: router.tokens[number] for number in prompts} == wanted


async def test_a_large_submit_arrives_whole(served, router_of, make_sequence) -> None:
    prompt = [i % 400 for i in range(1000)]
    async with router_of(served) as router:
        await router.submit(*(make_sequence(n, [*prompt, n], 2) for n in range(400)))
        await router.read_until(lambda r: len(r.finished) == 400)
        assert {f.reason for f in router.finished.values()} == {wire.FINISH_REASON_LENGTH}
        assert {f.prompt_tokens for f in router.finished.values()} == {1001}


async def test_a_prompt_continues_spans_of_an_earlier_one(served, router_of, make_sequence) -> None:
    prompt, root = array("I", [i % 400 for i in range(SPAN_TOKENS + 40)]), b"r" * HASH_BYTES
    [name] = span_names(chained_hashes(prompt, root))
    rest = {
        "prompt_ids": packed_ids(prompt[SPAN_TOKENS:]),
        "known_span": name,
        "known_tokens": SPAN_TOKENS,
    }
    async with router_of(served) as router:
        assert PROMPT_SPANS in router.attached.limits.features
        await router.submit(make_sequence(1, [], 9, cache_root=root, **rest))
        await router.submit(make_sequence(2, list(prompt), 9, cache_root=root))
        await router.read_until(lambda r: {1, 2} <= r.finished.keys())
        assert router.finished[1].reason == wire.FINISH_REASON_UNKNOWN_SPAN
        foreign = make_sequence(4, [], 9, cache_root=b"o" * HASH_BYTES, **rest)
        await router.submit(make_sequence(3, [], 9, cache_root=root, **rest), foreign)
        await router.read_until(lambda r: {3, 4} <= r.finished.keys())
        assert router.finished[4].reason == wire.FINISH_REASON_UNKNOWN_SPAN
        assert router.finished[3].prompt_tokens == len(prompt)
        assert router.admitted[3].cached_tokens == SPAN_TOKENS + BLOCK_TOKENS
        assert router.tokens[3] == router.tokens[2]
        assert router.tokens.keys() == {2, 3}


async def test_a_cancel_frees_blocks(served, router_of, make_sequence) -> None:
    async with router_of(served) as router:
        await router.submit(make_sequence(1, [5] * 100, 1500), make_sequence(2, [6] * 100, 1500))
        await router.read_until(lambda r: {1, 2} <= r.tokens.keys())
        await router.cancel(1, 2)
        await router.read_until(lambda r: {1, 2} <= r.finished.keys())
        reasons = {finished.reason for finished in router.finished.values()}
        assert reasons == {wire.FINISH_REASON_CANCELLED}
        await router.read_until(lambda r: not r.steps[-1].finished)
        assert router.steps[-1].state.kv_blocks_used == 0


async def test_without_credit_steps_are_merged(served, router_of, make_sequence) -> None:
    async with router_of(served, "silent", credit=0) as silent, router_of(served, "other") as other:
        await silent.submit(make_sequence(1, [5] * 10, 40))
        await other.read_until(lambda r: any(s.state.running for s in r.steps))
        await other.read_until(lambda r: not r.steps[-1].state.running)
        credit = wire.Credit(epoch=silent.epoch, frames=1)
        await silent.stream.send(wire.HostRequest(credit=credit))
        await silent.read_until(lambda r: 1 in r.finished)
        assert len(silent.steps) == 1
        assert len(silent.tokens[1]) == 40
        assert silent.steps[0].steps >= 40


async def test_a_probe_answers_beside_attachments(served, router_of, make_sequence) -> None:
    async with router_of(served) as router:
        await router.submit(make_sequence(1, [5] * 10, 500))
        reply = await probe(served.address, MODEL, [5, 6, 7], 3, WAIT_S)
        assert len(reply.tokens) == 3
        assert (reply.engine, reply.base_digest) == (served.engine, served.digest)
        await router.cancel(1)
        await router.read_until(lambda r: 1 in r.finished)
    with pytest.raises(FailedError, match="vocabulary") as caught:
        await probe(served.address, MODEL, [999_999], 1, WAIT_S)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


async def test_an_invalid_sequence_is_refused_alone(served, router_of, make_sequence) -> None:
    async with router_of(served) as router:
        await router.submit(make_sequence(1, [5], 5000), make_sequence(2, [5], 4))
        await router.read_until(lambda r: {1, 2} <= r.finished.keys())
    assert router.finished[1].reason == wire.FINISH_REASON_REFUSED
    assert router.finished[1].code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert router.finished[2].reason == wire.FINISH_REASON_LENGTH


async def test_an_idle_host_gives_signs_of_life(served, router_of) -> None:
    async with router_of(served) as router:
        await router.read_until(lambda r: len(r.steps) >= 4)
        assert router.steps[0].kv_events.reset


async def test_a_router_that_vanishes_leaves_nothing(served, router_of, make_sequence) -> None:
    async with router_of(served, "observer") as observer:
        vanishing = router_of(served, "vanishing")
        await vanishing.__aenter__()
        await vanishing.submit(make_sequence(1, [5] * 10, 1900), make_sequence(2, [6] * 10, 1900))
        await vanishing.read_until(lambda r: {1, 2} <= r.tokens.keys())
        await vanishing.stream.close(timeout_s=0.0)
        await observer.read_until(lambda r: any(s.state.running for s in r.steps))
        await observer.read_until(lambda r: not r.steps[-1].state.running)


async def test_routers_that_come_and_go_do_no_harm(served, router_of, make_sequence) -> None:
    """Also those who cut the stream: a cancel that meets a final response kills the server."""

    async def come_and_go(name: str) -> None:
        for turn in range(20):
            router = router_of(served, name)
            await router.__aenter__()
            await router.submit(*(make_sequence(n, [n + 3] * 20, 30) for n in range(4)))
            is_polite = turn % 2 == 0
            if is_polite:
                await router.read_until(lambda r: len(r.finished) == 4)
            await router.stream.close(timeout_s=WAIT_S if is_polite else 0.0)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(come_and_go(f"visitor-{number}"))
    assert len((await probe(served.address, MODEL, [5], 1, WAIT_S)).tokens) == 1


async def test_metrics_have_the_names_of_tensorrt_llm(served) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as client, asyncio.timeout(WAIT_S):
        text = ""
        while not re.search(r'llm_prefix_cache_tokens_total\{.*result="miss".*\} [1-9]', text):
            await probe(served.address, MODEL, [5, 6], 2, WAIT_S)
            text = (await client.get(served.metrics_url)).text
    blocks = str(served.blocks)
    pattern = r"nv_trt_llm_kv_cache_block_metrics\{.*kv_cache_block_type=\"max\".*\} "
    assert re.search(pattern + blocks, text)
    assert "nv_trt_llm_request_metrics" in text


async def test_a_drained_server_stops_in_order(
    tmp_path: Path, run_triton, router_of, make_sequence
) -> None:
    async with run_triton(tmp_path, "sim") as served:
        for _ in range(3):
            async with router_of(served) as router:
                await router.submit(*(make_sequence(n, [n + 3], 5) for n in range(64)))
                await router.read_until(lambda r: len(r.finished) == 64)
    assert await served.child.wait() == 0, served.child.log_tail(20)


def refusal_of(call: Callable[..., Any], sent: Any, shown: Any) -> str:
    try:
        answer = call(sent, metadata=shown, timeout=WAIT_S)
        return f"it answered {next(answer)}"
    except grpc.RpcError as error:
        return str(error)


async def test_no_call_of_any_kind_is_answered_without_the_installations_secret(served) -> None:
    loads_code = messages.RepositoryModelLoadRequest(model_name="own")
    loads_code.parameters["config"].string_param = '{"backend": "python"}'
    loads_code.parameters["file:1/model.py"].bytes_param = b"import os"
    name, value = engine_header()
    name = f"triton-grpc-protocol-{name}"
    methods = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    with grpc.insecure_channel(served.address) as channel:
        calls = [
            channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
            if method.name == "ModelStreamInfer"
            else channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
            for method in methods
        ]
        assert len(calls) >= 20
        for shown in (None, [(name, "0" * len(value))], [("sluice-token", value)]):
            for method, call in zip(methods, calls, strict=True):
                request = loads_code.SerializeToString() * ("Load" in method.name)
                sent = iter([request]) if method.name == "ModelStreamInfer" else request
                assert "restricted" in refusal_of(call, sent, shown), method.name
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", metadata=[(name, value)], timeout=WAIT_S)
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert "restricted" in refusal_of(health, b"", None)


async def test_other_users_of_the_machine_see_no_secret_and_no_other_port(served) -> None:
    value = engine_header()[1]
    process = psutil.Process(served.child.pid)
    shown = [" ".join(it.cmdline()) for it in (process, *process.children(recursive=True))]
    assert value not in str(shown)
    assert all(value not in str(it.environ()) for it in process.children(recursive=True))
    links = [it for it in process.net_connections("inet") if it.status == psutil.CONN_LISTEN]
    listening = {(link.laddr.ip.removeprefix("::ffff:"), link.laddr.port) for link in links}
    metrics = httpx.URL(served.metrics_url)
    host, port = host_and_port(served.address)
    assert listening == {(host, port), ("127.0.0.1", metrics.port)}


async def test_a_base_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    write_random_model(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gpt2"}')
    digest = import_directory(tmp_path / "base", tmp_path / "artifacts")
    launcher = TritonLauncher(state_dir=tmp_path / "s", artifacts_dir=tmp_path / "artifacts")
    launch = launcher.prepare("r1", EngineSpec("openvino", digest))
    child = await launch.start()
    try:
        async with asyncio.timeout(WAIT_S):
            assert await child.wait() != 0
    finally:
        await child.stop()
    assert "ArtifactError" in child.spec.log_file.read_text()
