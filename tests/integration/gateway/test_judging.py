"""Moderations, classify and rerank through a real worker: SDK, shapes, limits, usage, failures."""

import json
import math

import openai
import pytest

from sluice.events import EventProducer
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.support.scripted_embedder import scores_of

from .conftest import KEY, LIMITED_KEY
from .test_embeddings import MODEL, embedding  # noqa: F401 - a fixture

pytestmark = pytest.mark.real


@pytest.fixture
def told_events(monkeypatch) -> list[RequestEvent]:
    found: list[RequestEvent] = []
    parse = RequestEvent.FromString
    monkeypatch.setattr(EventProducer, "emit", lambda _, payload: found.append(parse(payload)))
    return found


async def test_the_sdk_gets_moderations_that_count_as_requests(world, told_events) -> None:
    async with world() as w, w.sdk() as sdk:
        rude, kind = "You are a pathetic loser, shut up!", "The bread is in the kitchen."
        answer = await sdk.moderations.create(input=[rude, kind])
        assert answer.model == "shipped"
        first, second = answer.results
        assert (first.flagged, second.flagged) == (True, False)
        assert first.categories.harassment
        assert first.category_scores.harassment > 0.5 > first.category_scores.sexual
        assert first.category_applied_input_types.harassment == ["text"]
        assert not first.categories.sexual_minors  # which the shipped one does not judge
        parts = [{"type": "text", "text": rude}]
        named = await sdk.moderations.create(model="omni-moderation-latest", input=parts)
        assert named.results[0].flagged
        with pytest.raises(openai.NotFoundError, match="no classifier 'other'"):
            await sdk.moderations.create(model="other", input=kind)
        with pytest.raises(openai.BadRequestError):
            await sdk.moderations.create(input=[])
        async with w.sdk(LIMITED_KEY) as limited:
            for _ in range(5):
                await limited.moderations.create(input=kind)
            with pytest.raises(openai.RateLimitError):
                await limited.moderations.create(input=kind)
    assert {(it.endpoint, it.model, it.status) for it in told_events} == {
        ("/v1/moderations", "shipped", 200)
    }


async def test_a_moderation_that_is_down_is_503(world, tmp_path) -> None:
    file = tmp_path / "classifiers.json"
    gone = {"name": "gone", "kind": "http", "url": "http://127.0.0.1:1/v1/moderations"}
    file.write_text(json.dumps([gone]))
    async with world(classifiers=file) as w, w.http(KEY) as http:
        answer = await http.post("/v1/moderations", json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        answer = await http.post("/v1/moderations", json={"input": "a", "model": "shipped"})
        assert answer.status_code == 200


async def test_documents_are_ordered_and_texts_get_labels_by_their_vectors(
    embedding,  # noqa: F811
    told_events,
) -> None:
    async with embedding() as e, e.world.http(KEY) as http:
        documents = ["one", {"text": "two"}, "three", "query"]
        body = {"model": MODEL, "query": "query", "documents": documents}
        ranked = (await http.post("/v1/rerank", json=body)).json()
        cosines = [
            sum(a * b for a, b in zip(e.vector("query"), e.vector(it), strict=True))
            for it in ("one", "two", "three", "query")
        ]
        order = sorted(range(4), key=lambda it: -cosines[it])
        assert [it["index"] for it in ranked["results"]] == order
        assert order[0] == 3
        scores = [it["relevance_score"] for it in ranked["results"]]
        assert scores == pytest.approx([cosines[it] for it in order])
        tokens = sum(len(e.ids(it)) for it in ("query", "one", "two", "three", "query"))
        assert ranked["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        for path in ("/v2/rerank", "/rerank"):
            few = await http.post(path, json={**body, "top_n": 1, "return_documents": True})
            [best] = few.json()["results"]
            assert (best["index"], best["document"]) == (3, {"text": "query"})
        asked = {"model": MODEL, "input": ["cat", "dog"], "labels": ["dog", "cat"]}
        told = (await http.post("/v1/classify", json=asked)).json()
        assert [it["label"] for it in told["data"]] == ["cat", "dog"]
        assert sum(told["data"][0]["probs"]) == pytest.approx(1.0)
        own = {"model": "shipped", "input": "You are a pathetic loser, shut up!"}
        [row] = (await http.post("/v1/classify", json=own)).json()["data"]
        assert row["label"] == "harassment"
        for wrong in (
            {**asked, "labels": ["a", "a"]},
            {**asked, "labels": ["a", " "]},
            {**asked, "labels": ["a"]},
            {**body, "documents": []},
        ):
            path = "/v1/rerank" if "query" in wrong else "/v1/classify"
            assert (await http.post(path, json=wrong)).status_code == 400, wrong
        refused = await http.post("/v1/classify", json={**asked, "labels": None})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "labels")
        unknown = await http.post("/v1/classify", json={"model": "none-such", "input": "a"})
        assert unknown.status_code == 404
    assert {it.endpoint for it in told_events} == {"/v1/rerank", "/v1/classify"}
    assert sum(it.prompt_tokens for it in told_events if it.endpoint == "/v1/rerank") == 3 * tokens


async def test_a_cross_encoder_reads_the_query_with_each_document(
    embedding,  # noqa: F811
    told_events,
) -> None:
    async with embedding(labels=("LABEL_0",)) as e, e.world.http(KEY) as http:
        documents = ["one", "two", "three"]
        body = {"model": MODEL, "query": "query", "documents": documents}
        ranked = (await http.post("/v1/rerank", json=body)).json()
        pairs = [e.pair("query", it) for it in documents]
        wanted = [1 / (1 + math.exp(-scores_of(it, 1)[0])) for it in pairs]
        order = sorted(range(3), key=lambda it: -wanted[it])
        assert [it["index"] for it in ranked["results"]] == order
        scores = [it["relevance_score"] for it in ranked["results"]]
        assert scores == pytest.approx([wanted[it] for it in order])
        assert ranked["usage"]["total_tokens"] == sum(map(len, pairs))
        [replica] = e.replicas
        assert sorted(replica.texts) == sorted(map(tuple, pairs))
        assert set(replica.second_begins) == {len("query") + 2}  # behind [CLS] and [SEP]

        asked = {"model": MODEL, "input": ["cat", "dog"], "labels": ["a", "b"]}
        told = (await http.post("/v1/classify", json=asked)).json()["data"]
        for row, text in zip(told, ("cat", "dog"), strict=True):
            powers = [math.exp(scores_of(e.pair(text, it), 1)[0]) for it in ("a", "b")]
            assert row["probs"] == pytest.approx([it / sum(powers) for it in powers])
        for path, wrong in (
            ("/v1/embeddings", {"model": MODEL, "input": "a"}),
            ("/v1/classify", {**asked, "labels": None}),
            ("/v1/rerank", {**body, "documents": ["x" * 60]}),  # with the query 68 tokens of 64
        ):
            assert (await http.post(path, json=wrong)).status_code == 400, wrong
    assert {it.endpoint for it in told_events} == {"/v1/rerank", "/v1/classify"}


async def test_a_model_with_labels_of_its_own_classifies_texts(embedding) -> None:  # noqa: F811
    labels = ("sport", "science", "art")
    async with embedding(labels=labels) as e, e.world.http(KEY) as http:
        asked = {"model": MODEL, "input": ["cat", "dog"]}
        told = (await http.post("/v1/classify", json=asked)).json()
        for row, text in zip(told["data"], ("cat", "dog"), strict=True):
            powers = [math.exp(it) for it in scores_of(e.ids(text), 3)]
            assert row["probs"] == pytest.approx([it / sum(powers) for it in powers])
            assert row["label"] == labels[row["probs"].index(max(row["probs"]))]
        [replica] = e.replicas
        assert set(replica.second_begins) == {0}
        body = {"model": MODEL, "query": "a", "documents": ["b"]}
        refused = await http.post("/v1/rerank", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        with_labels = await http.post("/v1/classify", json={**asked, "labels": ["a", "b"]})
        assert with_labels.status_code == 400
