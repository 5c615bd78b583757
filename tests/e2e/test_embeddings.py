"""Embeddings, models and tokenizing on the whole stack, through the official SDK."""

import asyncio

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from cli.stack.home import Home, stored_secret
from replica.embedding.package import INSTALL, MODEL_NAME, find_package
from sluice import shared_secret
from sluice.embeddings import EmbeddingClient
from sluice.shared_secret import SharedSecret

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        find_package() is None, reason=f"the embedding model is not installed: {INSTALL}"
    ),
]

CHAT = "sluice-tiny"
TEXTS = [
    "A cat sits on the mat.",
    "Une tempête 🌊 arrive.",
    "The kitten rests on a rug.",
    "Interest rates rose by a quarter of a percent.",
    "x",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(f"{find_package()}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="module")
def direct(real_stack, tokenizer) -> np.ndarray:
    """What the replica itself makes of the texts: float32 [texts, dimensions]."""
    with real_stack.admin() as http:
        replicas = http.get("/v1/replicas").json()["data"]
    (address,) = [r["grpc_address"] for r in replicas if r["triton_model"] == "embed"]

    async def embed() -> list[list[float]]:
        async with EmbeddingClient(address) as client:
            found = [await client.embed(tokenizer.encode(text).ids, timeout_s=60) for text in TEXTS]
        return [list(embedding.values) for embedding in found]

    ours = shared_secret.ours()
    shared_secret.install(SharedSecret([stored_secret(Home(real_stack.home))]))
    try:
        return np.array(asyncio.run(embed()), np.float32)
    finally:
        shared_secret.install(ours)


def vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


def test_vectors_are_the_replica_s_own_in_every_form(real_client, tokenizer, direct) -> None:
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    create = real_client.embeddings.create
    for given, options in (
        (TEXTS, {}),  # the SDK asks for base64 and unpacks it
        (TEXTS, {"encoding_format": "float"}),
        (ids, {}),
    ):
        answer = create(model=MODEL_NAME, input=given, **options)
        assert np.abs(vectors(answer) - direct).max() < 1e-6
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for given in (TEXTS[1], ids[1]):
        alone = create(model=MODEL_NAME, input=given)
        assert np.abs(vectors(alone) - direct[1]).max() < 1e-6
    near, far = direct[0] @ direct[2], direct[0] @ direct[3]
    assert near > 0.5 > 0.2 > far


def test_fewer_dimensions(real_client, direct) -> None:
    answer = real_client.embeddings.create(model=MODEL_NAME, input=TEXTS, dimensions=64)
    cut = direct[:, :64]
    wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    assert np.abs(vectors(answer) - wanted).max() < 1e-6
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.embeddings.create(model=MODEL_NAME, input="x", dimensions=385)
    assert caught.value.param == "dimensions"


def test_hundreds_of_texts_at_once(real_client, direct) -> None:
    answer = real_client.embeddings.create(model=MODEL_NAME, input=TEXTS * 60)
    assert np.abs(vectors(answer) - np.tile(direct, (60, 1))).max() < 1e-4


def test_inputs_too_long_or_of_another_kind_are_refused(real_client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.embeddings.create(model=MODEL_NAME, input=["fine", "word " * 300])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    assert "302 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.embeddings.create(model=CHAT, input="x")
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "x"}]
        )
    assert caught.value.param == "model"


def test_models_say_how_they_are(real_client) -> None:
    listed = {model.id: model for model in real_client.models.list()}
    for name, kind, window in ((CHAT, "chat", 4096), (MODEL_NAME, "embedding", 256)):
        shown = real_client.models.retrieve(name)
        assert (shown.kind, shown.readiness, shown.context_window) == (kind, "ready", window)
        assert shown.capacity["replicas_ready"] >= 1
        assert shown.limits.keys() == {"rpm", "tpm", "rpd", "requests_max"}
        assert listed[name].kind == kind
    adapters = [model for model in listed.values() if model.is_adapter]
    assert adapters
    assert {model.kind for model in adapters} == {"chat"}


@pytest.mark.parametrize("text", ["Hello, world!", "  spaces\n\n\tand tabs ", "héllo 你好 😀 ��"])
def test_a_text_survives_tokenizing(real_client, text: str) -> None:
    made = real_client.post("/tokenize", body={"model": CHAT, "prompt": text}, cast_to=dict)
    assert made["count"] == len(made["tokens"]) > 0
    assert made["max_model_len"] == 4096
    body = {"model": CHAT, "tokens": made["tokens"]}
    assert real_client.post("/detokenize", body=body, cast_to=dict) == {"prompt": text}


def test_a_chat_has_as_many_tokens_as_its_completion_says(real_client) -> None:
    messages = [{"role": "user", "content": "Count from 1 to 9"}]
    made = real_client.post("/tokenize", body={"model": CHAT, "messages": messages}, cast_to=dict)
    answer = real_client.chat.completions.create(model=CHAT, messages=messages, max_tokens=1)
    assert made["count"] == answer.usage.prompt_tokens
