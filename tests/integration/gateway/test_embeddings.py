"""Embeddings and their models through a real worker, with scripted replicas behind it."""

import asyncio
import base64
import math
import time
from array import array
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from gateway.embedding.embedders import IN_FLIGHT_MAX, WINDOW_TEXTS
from gateway.limits.limiter import Limiter
from sluice.artifacts import import_directory
from sluice.events import EventProducer
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.support.scripted_embedder import (
    ScriptedEmbedder,
    ready_replica,
    serve_embedder,
    vector_of,
    write_embedding_base,
)
from tests.waiting import until

pytestmark = pytest.mark.real

MODEL, POOL, DIMENSIONS, CONTEXT = "a-vectors", "embedding-pool", 24, 64
LIMITED = "sk-limited"


class Embedding:
    """A world with an embedding pool."""

    def __init__(self, world, digest: str, tokenizer: Tokenizer) -> None:
        self.world = world
        self.digest = digest
        self.tokenizer = tokenizer
        self.replicas: list[ScriptedEmbedder] = []

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def pair(self, first: str, second: str) -> list[int]:
        return self.tokenizer.encode(first, second).ids

    def vector(self, text: str) -> list[float]:
        return list(vector_of(self.ids(text), DIMENSIONS))


@pytest.fixture
def embedding(world, artifacts, eventually, tmp_path: Path):
    @asynccontextmanager
    async def start(replicas: int = 1, labels: tuple[str, ...] = (), **settings):
        path, dimensions = tmp_path / "base", len(labels) or DIMENSIONS
        tokenizer = write_embedding_base(path, dimensions=DIMENSIONS, labels=labels)
        digest = import_directory(tmp_path / "base", artifacts[0])
        async with world(**settings) as w, AsyncExitStack() as servers:
            made = Embedding(w, digest, tokenizer)
            objects = control.Objects()
            objects.CopyFrom(w.feed.objects)
            objects.bases.add(digest=digest, context_tokens_max=CONTEXT)
            objects.pools.add(id=POOL, base_digest=digest, engine="embed")
            objects.models.add(id=MODEL, base_digest=digest, pool_id=POOL, release="r7")
            for number in range(replicas):
                embedder = ScriptedEmbedder(dimensions=dimensions, gives_scores=bool(labels))
                made.replicas.append(embedder)
                address = await servers.enter_async_context(serve_embedder(embedder))
                objects.replicas.append(ready_replica(f"embedder-{number}", POOL, address))
            w.feed.replace(objects)
            await eventually(lambda: w.gateway.embedders.usable == replicas)
            yield made

    return start


@pytest.fixture
def events(monkeypatch) -> list:
    found: list = []
    parse = RequestEvent.FromString
    monkeypatch.setattr(EventProducer, "emit", lambda _, payload: found.append(parse(payload)))
    return found


async def test_texts_become_vectors_in_their_order(embedding, events) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        texts = [f"text number {n}" for n in range(100)]
        for encoding in ("float", "base64"):
            answer = await sdk.embeddings.create(model=MODEL, input=texts, encoding_format=encoding)
            assert [item.index for item in answer.data] == list(range(100))
            for text, item in zip(texts, answer.data, strict=True):
                vector = item.embedding
                if encoding == "base64":
                    vector = list(array("f", base64.b64decode(vector)))
                assert vector == e.vector(text)
            tokens = sum(len(e.ids(text)) for text in texts)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
            assert (answer.object, answer.model) == ("list", MODEL)
        assert [(v.prompt_tokens, v.output_tokens, v.status) for v in events] == [
            (tokens, 0, 200)
        ] * 2
        assert events[0].endpoint == "/v1/embeddings"
        assert events[0].model == events[0].requested_model == MODEL
        assert events[0].release == "r7"
        assert events[0].outcome == "stop"


async def test_an_answer_says_which_model_an_alias_stands_for(
    embedding, events, eventually
) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        objects, state = control.Objects(), e.world.gateway.watcher.state
        objects.CopyFrom(e.world.feed.objects)
        objects.aliases.add(id="best", target=MODEL)
        e.world.feed.replace(objects)
        await eventually(lambda: "best" in state.aliases)
        response = await sdk.embeddings.with_raw_response.create(model="best", input="a")
        assert response.parse().model == response.headers["x-sluice-model"] == MODEL
        assert (events[0].requested_model, events[0].model) == ("best", MODEL)


async def test_the_sdk_alone_asks_for_base64_and_gives_numbers(embedding) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        answer = await sdk.embeddings.create(model=MODEL, input="one text")
        assert answer.data[0].embedding == e.vector("one text")


async def test_token_ids_are_taken_as_they_are(embedding) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        ids = e.ids("a text")
        for given, expected in (
            (ids, [ids]),
            ([ids, ids[1:-1], [5]], [ids, ids[1:-1], [5]]),
        ):
            answer = await sdk.embeddings.create(model=MODEL, input=given)
            assert [item.embedding for item in answer.data] == [
                list(vector_of(one, DIMENSIONS)) for one in expected
            ]


async def test_fewer_dimensions_are_the_first_ones_at_length_one(embedding) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        full = e.vector("a text")
        for count in (1, 10, DIMENSIONS):
            answer = await sdk.embeddings.create(model=MODEL, input="a text", dimensions=count)
            vector = answer.data[0].embedding
            assert len(vector) == count
            assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-6)
            assert np.array(vector) * math.hypot(*full[:count]) == pytest.approx(
                full[:count], abs=1e-6
            )


async def test_the_largest_request_is_answered_whole(embedding) -> None:
    async with embedding(2) as e, e.world.sdk() as sdk:
        answer = await sdk.embeddings.create(
            model=MODEL, input=[str(n) for n in range(2048)], encoding_format="float"
        )
        assert [item.index for item in answer.data] == list(range(2048))
        assert answer.data[2047].embedding == e.vector("2047")


async def test_a_long_text_is_cut_when_that_is_asked_for(embedding) -> None:
    async with embedding() as e, e.world.http() as http:
        long = "x" * CONTEXT  # one token per character, and two special ones
        for tokens_max, tokens in ((-1, CONTEXT), (7, 7), (CONTEXT, CONTEXT)):
            body = {"model": MODEL, "input": long, "truncate_prompt_tokens": tokens_max}
            response = await http.post("/v1/embeddings", json=body)
            assert response.json()["usage"]["prompt_tokens"] == tokens
            cut = "x" * (tokens - 2)
            assert response.json()["data"][0]["embedding"] == e.vector(cut)


async def test_inputs_that_cannot_be_embedded_are_refused_by_name(embedding, events) -> None:
    async with embedding() as e, e.world.http() as http:
        long = "x" * CONTEXT  # one token per character, and two special ones
        cases = [
            ({"input": ""}, "invalid_request", "input"),
            ({"input": []}, "invalid_request", "input"),
            ({"input": ["a", ""]}, "invalid_request", "input[1]"),
            ({"input": [[]]}, "invalid_request", "input[0]"),
            ({"input": long}, "context_length_exceeded", "input"),
            ({"input": ["fine", long]}, "context_length_exceeded", "input[1]"),
            ({"input": [5, 192]}, "invalid_request", "input"),
            ({"input": [[5], [192]]}, "invalid_request", "input[1]"),
            ({"input": ["a"] * 2049}, "invalid_request", "input"),
            ({"input": "a", "dimensions": DIMENSIONS + 1}, "invalid_request", "dimensions"),
            ({"input": "a", "dimensions": 0}, "invalid_request", "dimensions"),
            ({"input": "a", "encoding_format": "hex"}, "invalid_request", "encoding_format"),
            ({"input": "a", "model": "tiny"}, "invalid_request", "model"),
            ({"input": "a", "model": "none"}, "model_not_found", "model"),
            ({"input": "a", "more": 1}, "invalid_request", "more"),
        ]
        for fields, code, param in cases:
            response = await http.post("/v1/embeddings", json={"model": MODEL} | fields)
            error = response.json()["error"]
            assert (error["code"], error["param"]) == (code, param), (fields, error)
            assert response.status_code == (404 if code == "model_not_found" else 400)
        assert not e.replicas[0].texts
        assert not events


async def test_overload_and_failures_have_their_codes(embedding, events) -> None:
    async with embedding() as e, e.world.http() as http:
        body = {"model": MODEL, "input": "a"}
        e.replicas[0].failure = (grpc.StatusCode.INTERNAL, "the graph call failed at 10.0.0.1")
        response = await http.post("/v1/embeddings", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")
        assert "10.0.0.1" not in response.text
        e.replicas[0].failure = (grpc.StatusCode.UNAVAILABLE, "going away")
        for code in ("unavailable", "unavailable"):
            response = await http.post("/v1/embeddings", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "server_error"
        assert [(v.status, v.outcome) for v in events] == [
            (502, "engine_failed"),
            (503, "unavailable"),
            (503, "unavailable"),
        ]
        assert {v.prompt_tokens for v in events} == {0}


async def test_a_client_that_hangs_up_stops_the_work(embedding, events, eventually) -> None:
    async with embedding() as e, e.world.http() as http:
        (replica,) = e.replicas
        replica.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            body = {"model": MODEL, "input": [str(n) for n in range(500)]}
            call = tasks.create_task(http.post("/v1/embeddings", json=body))
            await eventually(lambda: replica.texts)
            call.cancel()
        await eventually(lambda: events)
        await eventually(lambda: replica.cancelled == len(replica.texts))
        assert (events[0].status, events[0].outcome) == (499, "client_closed")
        assert e.world.gateway.embedders.open == 0


EIGHTEEN = {"model": MODEL, "input": ["w" * 50] * 18}


async def until_unanswered(e, count: int) -> None:
    """Wait until the only replica has so many texts, none of which it answers."""
    (replica,) = e.replicas
    replica.answers.clear()
    await until(lambda: len(replica.texts) == count)


async def test_a_caller_that_hangs_up_pays_for_work_under_way(
    embedding, events, eventually
) -> None:
    async with embedding() as e, e.world.http(LIMITED) as http:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(http.post("/v1/embeddings", json=EIGHTEEN))
            await until_unanswered(e, 18)
            call.cancel()
        await eventually(lambda: events)
        assert events[0].prompt_tokens == 18 * len(e.ids("w" * 50))
        response = await http.post("/v1/embeddings", json=EIGHTEEN)
        assert response.json()["error"]["code"] == "rate_limit_tokens"
        assert int(response.headers["x-ratelimit-remaining-requests"]) <= 4


async def test_a_caller_cut_by_a_stopping_gateway_gets_an_error_and_pays_for_no_missing_text(
    embedding, events, monkeypatch
) -> None:
    settled, settle = [], Limiter.settle

    def note(limiter, reservation, **how) -> None:
        settled.append((how["prompt_tokens"], how["was_served"]))
        settle(limiter, reservation, **how)

    monkeypatch.setattr(Limiter, "settle", note)
    async with embedding(drain_s=0.1) as e, e.world.http(LIMITED) as http:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(http.post("/v1/embeddings", json=EIGHTEEN))
            await until_unanswered(e, 18)
            await e.world.gateway.stop()
        assert call.result().status_code == 503
        assert call.result().json()["error"]["code"] == "draining"
        assert [(v.status, v.outcome, v.prompt_tokens) for v in events] == [(503, "draining", 0)]
        assert settled == [(0, False)]


async def test_limits_count_requests_and_tokens(embedding) -> None:
    async with embedding() as e, e.world.http(LIMITED) as http, e.world.sdk(LIMITED) as sdk:
        began_at_s = time.monotonic()
        body = {"model": MODEL, "input": ["w" * 50] * 18}
        used = 18 * len(e.ids("w" * 50))
        response = await http.post("/v1/embeddings", json=body)
        assert 1000 - used <= int(response.headers["x-ratelimit-remaining-tokens"]) < 1000
        response = await http.post("/v1/embeddings", json=body)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_tokens"
        assert response.headers["retry-after"]
        answers = await asyncio.gather(
            *(sdk.embeddings.create(model=MODEL, input="a") for _ in range(20)),
            return_exceptions=True,
        )
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        assert {error.code for error in refused} == {"rate_limit_requests"}
        minutes = (time.monotonic() - began_at_s) / 60
        assert 1 + len(answers) - len(refused) <= 5 + 5 * minutes


async def test_a_large_body_that_is_refused_costs_a_request(embedding) -> None:
    async with embedding() as e, e.world.http(LIMITED) as http:
        began_at_s = time.monotonic()
        text = " " * 17_000 + "w " * CONTEXT
        bodies = (
            ("/v1/embeddings", {"input": text}),
            ("/v1/rerank", {"query": "a", "documents": [text]}),
            ("/v1/classify", {"input": [text], "labels": ["a", "b"]}),
        )
        asked = [http.post(path, json={"model": MODEL} | body) for path, body in bodies * 8]
        codes = [answer.status_code for answer in await asyncio.gather(*asked)]
        minutes = (time.monotonic() - began_at_s) / 60
        assert set(codes) == {400, 429}
        assert codes.count(400) <= 5 + 5 * minutes
        assert not e.replicas[0].texts


async def test_a_large_body_is_counted_once(embedding) -> None:
    async with embedding() as e, e.world.http(LIMITED) as http:
        text = " " * 20_000 + "w" * 30
        response = await http.post("/v1/embeddings", json={"model": MODEL, "input": text})
        assert response.headers["x-ratelimit-remaining-requests"] == "4"
        used = len(e.ids(text))
        assert 1000 - used <= int(response.headers["x-ratelimit-remaining-tokens"]) < 1000


async def test_models_list_their_kind_and_properties(embedding) -> None:
    async with embedding() as e, e.world.sdk(LIMITED) as sdk, e.world.http(LIMITED) as http:
        listed = {model.id: model for model in (await sdk.models.list()).data}
        # By name, the embedding model last: tools that are told no model take the first one.
        assert list(listed) == ["nowhere", "tiny", MODEL]
        shown = (await http.get(f"/v1/models/{MODEL}")).json()
        assert shown == {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "sluice",
            "kind": "embedding",
            "stands_for": MODEL,
            "release": "r7",
            "is_adapter": False,
            "context_window": CONTEXT,
            "readiness": "ready",
            "capacity": {"replicas_ready": 1, "queued": 0, "running": 0, "wait_ms": None},
            "limits": {"rpm": 5, "tpm": 1000, "rpd": None, "requests_max": None},
        }
        assert listed["tiny"].kind == "chat"
        assert listed["tiny"].readiness == "ready"
        assert listed["tiny"].capacity["wait_ms"] == 0
        assert listed["nowhere"].readiness == "unavailable"
        assert listed["nowhere"].capacity["replicas_ready"] == 0


async def test_an_embedding_model_is_tokenized_like_its_texts(embedding) -> None:
    async with embedding() as e, e.world.http() as http:
        for has_special_tokens in (True, False):
            body = {"prompt": "a text", "add_special_tokens": has_special_tokens}
            made = await http.post("/v1/tokenize", json={"model": MODEL} | body)
            ids = e.ids("a text") if has_special_tokens else e.ids("a text")[1:-1]
            assert made.json() == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
        back = await http.post("/v1/detokenize", json={"model": MODEL, "tokens": ids})
        assert back.json() == {"prompt": "a text"}
        for path, fields, param in (
            ("tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("detokenize", {"tokens": [192]}, "tokens"),
        ):
            response = await http.post(f"/v1/{path}", json={"model": MODEL} | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


async def test_a_lower_tier_without_a_place_is_refused_before_any_work(
    embedding, events, eventually
) -> None:
    async with embedding() as e, e.world.sdk() as sdk:
        objects, state = control.Objects(), e.world.gateway.watcher.state
        objects.CopyFrom(e.world.feed.objects)
        objects.tiers.add(id="gold", priority=9)
        e.world.feed.replace(objects)
        await eventually(lambda: "gold" in state.tiers)
        (replica,) = e.replicas
        replica.answers.clear()
        texts = [f"text {n}" for n in range(WINDOW_TEXTS)]
        requests = IN_FLIGHT_MAX * 3 // 4 // WINDOW_TEXTS
        async with asyncio.TaskGroup() as tasks:
            for _ in range(requests):
                tasks.create_task(sdk.embeddings.create(model=MODEL, input=texts))
            await until(lambda: len(replica.texts) == requests * WINDOW_TEXTS)
            too_long = ["word " * 2 * CONTEXT]  # which only a tokenizer can tell
            with pytest.raises(openai.InternalServerError, match="The queue is full") as caught:
                await sdk.embeddings.create(model=MODEL, input=too_long)
            assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
            replica.answers.set()
        page = e.world.gateway.metrics.page().decode()
        assert "gateway_gate_refusals_total 1.0" in page
        refused = '"/v1/embeddings"', '"queue_full"'
        counted = [it for it in page.splitlines() if all(label in it for label in refused)]
        assert counted, "as a request that a limit refuses"
        assert len(events) == requests, "a refusal before any work has no event"
