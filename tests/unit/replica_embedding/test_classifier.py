"""Tests a base that classifies: a text or a pair results in one score per label."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.embedding.bert import read_bert_config
from replica.embedding.engine import EmbeddingEngine, load_embedding
from replica.engine.artifact import ArtifactError
from replica.engine.safetensors import read_safetensors, write_safetensors
from sluice.errors import BadRequestError, FailedError
from tests.support.random_bert import TINY

LABELS = 3
IDS = st.lists(st.integers(0, TINY.vocabulary - 1), min_size=2, max_size=TINY.tokens_max)
PAIRS = IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids) - 1)))


@pytest.fixture(scope="module")
def engine(tiny_classifier) -> EmbeddingEngine:
    return load_embedding(tiny_classifier, {})


@given(st.lists(PAIRS, min_size=1, max_size=12))
@settings(max_examples=25)
def test_pairs_and_texts_of_a_batch_get_the_scores_of_the_definition(
    engine, tiny_classifier, reference, pairs
) -> None:
    rows = [np.array([ids], np.int32) for ids, _ in pairs]
    found = engine.embed(rows, [begin for _, begin in pairs]).outcomes
    for (ids, begin), scores in zip(pairs, found, strict=True):
        assert scores.shape == (1, LABELS)
        assert np.abs(scores[0] - reference(tiny_classifier, ids, begin)).max() < 1e-4


def test_the_place_of_the_second_text_matters(engine) -> None:
    row = np.array([[5, 6, 7, 8]], np.int32)
    first, second, single = engine.embed([row] * 3, [1, 2, 0]).outcomes
    assert np.abs(first - second).max() > 1e-3 < np.abs(second - single).max()


@pytest.mark.parametrize("begin", [-1, 4, 5])
def test_a_place_outside_of_the_row_is_refused_alone(engine, begin) -> None:
    row = np.array([[5, 6, 7, 8]], np.int32)
    bad, good = engine.embed([row, row], [begin, 2]).outcomes
    assert isinstance(bad, BadRequestError)
    assert good.shape == (1, LABELS)


def test_a_base_that_embeds_refuses_pairs(tiny) -> None:
    row = np.array([[5, 6, 7, 8]], np.int32)
    [refusal] = load_embedding(tiny, {}).embed([row], [2]).outcomes
    assert isinstance(refusal, BadRequestError)
    assert "single texts" in refusal.message


@pytest.mark.parametrize("name", ["tiny", "tiny_classifier"])
def test_a_value_that_is_no_number_fails_its_text_alone(request, tmp_path, name) -> None:
    base = Path(shutil.copytree(request.getfixturevalue(name), tmp_path / "base"))
    path = base / "model.safetensors"
    tensors = {key: values.copy() for key, values in read_safetensors(path).items()}
    for key, values in tensors.items():
        if key.endswith("word_embeddings.weight"):
            values[7] = np.nan
    write_safetensors(path, tensors)
    bad, good = (
        load_embedding(base, {})
        .embed([np.array([[5, 7]], np.int32), np.array([[5, 6, 8]], np.int32)])
        .outcomes
    )
    assert isinstance(bad, FailedError)
    assert np.isfinite(good).all()


def test_the_number_of_labels_is_that_of_the_config(tiny_classifier, tmp_path) -> None:
    assert read_bert_config(tiny_classifier).labels == LABELS
    base = Path(shutil.copytree(tiny_classifier, tmp_path / "base"))
    path = base / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_labels": 1, "problem_type": "regression"}))
    with pytest.raises(ArtifactError, match=r"classifier\.weight"):
        load_embedding(base, {})
    del config["id2label"]
    path.write_text(json.dumps(config))
    assert read_bert_config(base).labels == 2
    path.write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(ArtifactError, match="hidden_act 'relu'"):
        read_bert_config(base)
