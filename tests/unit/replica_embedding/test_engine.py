import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.drivers.options import OptionsError
from replica.embedding.engine import EmbeddingEngine, load_embedding
from sluice.errors import BadRequestError, ErrorCode, FailedError
from tests.support.random_bert import TINY

IDS = st.integers(0, TINY.vocabulary - 1)
TEXTS = st.lists(st.lists(IDS, min_size=1, max_size=TINY.tokens_max), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def engine(tiny) -> EmbeddingEngine:
    return load_embedding(tiny, {})


def one(ids) -> np.ndarray:
    return np.array([ids], np.int32)


def embed(engine, *texts) -> list:
    return engine.embed([one(text) for text in texts]).outcomes


@given(TEXTS)
@settings(max_examples=25)
def test_a_batch_gives_the_result_of_the_definition(engine, tiny, reference, texts) -> None:
    for text, vectors in zip(texts, embed(engine, *texts), strict=True):
        assert vectors.shape == (1, TINY.hidden)
        assert np.abs(vectors[0] - reference(tiny, text)).max() < 1e-5


@given(TEXTS, st.data())
@settings(max_examples=25)
def test_a_vector_does_not_depend_on_its_batch(engine, texts, data) -> None:
    index = data.draw(st.integers(0, len(texts) - 1))
    together, alone = embed(engine, *texts)[index], embed(engine, texts[index])[0]
    assert np.abs(together - alone).max() < 1e-5


def test_vectors_have_length_one_and_differ(engine) -> None:
    vectors = np.concatenate(embed(engine, [5, 6, 7], [7, 6, 5], [5, 6]))
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert (vectors @ vectors.T)[np.triu_indices(3, 1)].max() < 0.999


def test_a_request_may_hold_texts_of_one_length(engine) -> None:
    rows = np.array([[5, 6, 7], [9, 8, 7]], np.int32)
    batch = engine.embed([rows, one([5])])
    assert [outcome.shape for outcome in batch.outcomes] == [(2, TINY.hidden), (1, TINY.hidden)]
    alone = np.concatenate(embed(engine, [5, 6, 7], [9, 8, 7]))
    assert np.abs(batch.outcomes[0] - alone).max() < 1e-5
    assert (batch.texts, batch.tokens, batch.padding_tokens) == (3, 7, 2)


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        ([5] * 65, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "65 tokens.*at most 64"),
        ([5, 300], ErrorCode.INVALID_REQUEST, "vocabulary of 300"),
        ([-1], ErrorCode.INVALID_REQUEST, "vocabulary of 300"),
        ([], ErrorCode.INVALID_REQUEST, r"shape \[1, 0\]"),
    ],
)
def test_a_bad_request_is_refused_alone(engine, ids, code, words) -> None:
    good, bad, also_good = engine.embed([one([5, 6]), one(ids), one([7])]).outcomes
    assert isinstance(bad, BadRequestError)
    assert bad.code is code
    with pytest.raises(BadRequestError, match=words):
        raise bad
    assert good.shape == also_good.shape == (1, TINY.hidden)


def test_an_uncomputable_text_fails_alone(engine, monkeypatch) -> None:
    compute = engine._compute

    def fails_for_long(rows, second_begins):
        if len(rows[0]) > 20:
            raise RuntimeError("out of memory")
        return compute(rows, second_begins)

    monkeypatch.setattr(engine, "_compute", fails_for_long)
    short, long = embed(engine, [5, 6], [5] * 60)
    assert short.shape == (1, TINY.hidden)
    assert isinstance(long, FailedError)
    assert "out of memory" in long.message


def test_tokens_max_can_be_set_within_the_positions(tiny) -> None:
    assert load_embedding(tiny, {"tokens_max": "96"}).limits.tokens_max == 96
    with pytest.raises(OptionsError, match=r"97.*1\.\.96"):
        load_embedding(tiny, {"tokens_max": 97})
