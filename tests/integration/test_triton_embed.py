"""The model `embed` in a real Triton: one request per text, batches that form by themselves."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio

from replica.agent.model_kinds import KINDS, canary
from replica.agent.replica_state import EngineSpec
from replica.agent.triton import TritonLauncher, model_repository
from replica.embedding.engine import load_embedding
from replica.embedding.package import INSTALL, find_package
from sluice.artifacts import artifact_path, import_directory
from sluice.embeddings import EmbeddingClient, PairedTokens
from sluice.engines import profile_of
from sluice.errors import BadRequestError, ErrorCode, FailedError
from sluice.identity import CertificateRole
from sluice.triton import Stub, messages
from tests.links import trusted_channel
from tests.support.random_bert import TINY, write_random_bert
from tests.support.tritons import running_triton

pytestmark = pytest.mark.real

WAIT_S = 60.0
GOLDEN = Path(__file__).parents[1] / "unit" / "replica_embedding" / "minilm.golden.json"


@dataclass(frozen=True)
class Served:
    """A running Triton."""

    spec: EngineSpec
    directory: Path
    address: str
    metrics_url: str

    async def metric(self, pattern: str) -> float:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            text = (await client.get(self.metrics_url)).text
        found = re.search(rf"^{pattern} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])


@asynccontextmanager
async def running(home: Path, base: Path) -> AsyncGenerator[Served]:
    """Serve a base; Triton must live until the end, and end well."""
    digest = import_directory(base, home / "artifacts")
    spec = EngineSpec("embed", digest)
    async with running_triton(home, spec) as triton:
        directory = artifact_path(home / "artifacts", digest)
        yield Served(spec, directory, triton.address, triton.metrics_url)
        assert triton.child.is_running
    assert await triton.child.wait() == 0, triton.child.log_tail(20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    home = tmp_path_factory.mktemp("triton")
    write_random_bert(home / "base")
    async with running(home, home / "base") as served:
        yield served


def direct(served: Served, texts: list[list[int]]) -> np.ndarray:
    engine = load_embedding(served.directory, {})
    return np.concatenate(engine.embed([np.array([ids], np.int32) for ids in texts]).outcomes)


async def embed_all(served: Served, texts: list[list[int]]) -> list:
    async with EmbeddingClient(served.address) as client:
        calls = (client.embed(ids, timeout_s=WAIT_S) for ids in texts)
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_texts_of_all_lengths_form_batches(served: Served) -> None:
    texts = [[5 + n % 7] * (1 + n * 13 % TINY.tokens_max) for n in range(200)]
    batches = await served.metric(r"embed_batch_texts_count\{.*\}")
    found = await embed_all(served, texts)
    assert {len(embedding.values) for embedding in found} == {TINY.hidden}
    vectors = np.array([embedding.values for embedding in found])
    assert np.abs(vectors - direct(served, texts)).max() < 1e-5
    formed = await served.metric(r"embed_batch_texts_count\{.*\}") - batches
    assert formed <= 150
    widest = await served.metric(r'embed_batch_texts_bucket\{.*le="\+Inf"\}')
    assert widest > await served.metric(r'embed_batch_texts_bucket\{.*le="2"\}')


async def test_a_bad_text_fails_alone_with_its_code(served: Served) -> None:
    texts = [[5, 6], [5] * 65, [7], [TINY.vocabulary], [8, 9, 10], []]
    found = await embed_all(served, texts)
    for index, code, words in (
        (1, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "65 tokens.*at most 64"),
        (3, ErrorCode.INVALID_REQUEST, "vocabulary of 300"),
        (5, ErrorCode.INVALID_REQUEST, r"shape \[1, 0\]"),
    ):
        assert isinstance(found[index], BadRequestError)
        assert found[index].code is code
        assert re.search(words, str(found[index]))
    good = np.array([found[index].values for index in (0, 2, 4)])
    assert np.abs(good - direct(served, [texts[i] for i in (0, 2, 4)])).max() < 1e-5
    assert await served.metric(r'embed_requests_total\{.*result="refused".*\}') >= 3


async def test_a_client_of_another_kind_may_send_texts_of_one_length_together(
    served: Served,
) -> None:
    rows = np.array([[5, 6, 7], [9, 8, 7]], np.int32)
    request = messages.ModelInferRequest(model_name="embed")
    request.inputs.add(name="input_ids", datatype="INT32", shape=rows.shape)
    request.raw_input_contents.append(rows.tobytes())
    async with trusted_channel(served.address, role=CertificateRole.ENGINE) as channel:
        infer = Stub(channel).ModelInfer
        reply = await infer(request)
        outputs = {output.name: i for i, output in enumerate(reply.outputs)}
        vectors = np.frombuffer(reply.raw_output_contents[outputs["embedding"]], np.float32)
        assert np.abs(vectors.reshape(2, -1) - direct(served, rows.tolist())).max() < 1e-5
        digests = reply.raw_output_contents[outputs["base_digest"]]
        assert digests == served.spec.base_digest.encode() * 2
        request.inputs[0].datatype = "INT64"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_canary_knows_its_base(served: Served) -> None:
    assert await canary(served.address, served.spec, WAIT_S) == 0
    other = EngineSpec("embed", "0" * 64)
    with pytest.raises(FailedError, match="wanted is 0000") as caught:
        await canary(served.address, other, WAIT_S)
    assert caught.value.code is ErrorCode.ENGINE_FAILED
    with pytest.raises(FailedError) as caught:
        await canary("127.0.0.1:1", served.spec, 2.0)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_base_that_classifies_scores_pairs_and_texts(tmp_path: Path) -> None:
    write_random_bert(tmp_path / "base", labels=1)
    texts = [[5 + n % 7] * (4 + n * 13 % (TINY.tokens_max - 4)) for n in range(60)]
    rows: list[list[int]] = [PairedTokens(ids, 3) if n % 3 else ids for n, ids in enumerate(texts)]
    async with running(tmp_path, tmp_path / "base") as served:
        assert await canary(served.address, served.spec, WAIT_S) == 0
        found = np.array([it.values for it in await embed_all(served, rows)])
        engine = load_embedding(served.directory, {})
        begins = [3 if n % 3 else 0 for n in range(len(texts))]
        wanted = engine.embed([np.array([ids], np.int32) for ids in texts], begins).outcomes
        assert np.abs(found - np.concatenate(wanted)).max() < 1e-4
        [refusal] = await embed_all(served, [PairedTokens([5, 6], 2)])
        assert isinstance(refusal, BadRequestError)


def test_triton_may_prepare_the_next_batch_ahead() -> None:
    """Where it may not, it forgets to wake its batcher: a lone request then takes 500 ms."""
    config = (model_repository() / "embed" / "config.pbtxt").read_text()
    settings = "".join(line for line in config.splitlines() if not line.startswith("#"))
    assert "dynamic_batching { }" in settings


def test_everybody_calls_the_model_the_same() -> None:
    assert {e: kind.model for e, kind in KINDS.items()} == {
        engine: profile_of(engine).triton_model for engine in KINDS
    }


async def test_a_base_that_is_no_embedding_model_says_why(tmp_path: Path) -> None:
    write_random_bert(tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "roberta"}))
    digest = import_directory(tmp_path / "base", tmp_path / "artifacts")
    launcher = TritonLauncher(state_dir=tmp_path / "s", artifacts_dir=tmp_path / "artifacts")
    child = await launcher.prepare("r1", EngineSpec("embed", digest)).start()
    try:
        async with asyncio.timeout(WAIT_S):
            assert await child.wait() != 0
    finally:
        await child.stop()
    assert "model_type 'roberta'" in child.spec.log_file.read_text()


@pytest.mark.skipif(
    find_package() is None, reason=f"the embedding model is not installed: {INSTALL}"
)
async def test_the_packaged_model_gives_the_golden_vectors(tmp_path: Path) -> None:
    package = find_package()
    assert package is not None
    golden = json.loads(GOLDEN.read_text())
    async with running(tmp_path, package) as served:
        assert await canary(served.address, served.spec, WAIT_S) == 0
        found = await embed_all(served, [entry["ids"] for entry in golden] * 8)
        vectors = np.array([embedding.values for embedding in found])
        assert vectors.shape == (32, 384)
        wanted = np.array([entry["first"] for entry in golden] * 8)
        assert np.abs(vectors[:, :8] - wanted).max() < 1e-5
        assert vectors[0] @ vectors[1] == pytest.approx(0.678, abs=1e-3)
        alone = await embed_all(served, [golden[3]["ids"]])
        assert np.abs(vectors[3] - np.array(alone[0].values)).max() < 1e-4
