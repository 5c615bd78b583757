"""The packaged model against vectors that the numpy reference made (minilm.golden.json).

Left out where the package is not installed: `make setup` installs it, see requirements/embed.lock.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from replica.embedding.engine import EmbeddingEngine, load_embedding
from replica.embedding.package import INSTALL, PACKAGE, VERSION, find_package

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((Path(__file__).parent / "minilm.golden.json").read_text())
needs_package = pytest.mark.skipif(
    find_package() is None, reason=f"the embedding model is not installed: {INSTALL}"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    directory = find_package()
    assert directory is not None
    return directory


@pytest.fixture(scope="module")
def engine(directory: Path) -> EmbeddingEngine:
    return load_embedding(directory, {})


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """Return the model's tokenizer without its truncation and padding to 128 tokens."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def embed(engine: EmbeddingEngine, *texts: list[int]) -> list[np.ndarray]:
    requests = [np.array([ids], np.int32) for ids in texts]
    return [outcome[0] for outcome in engine.embed(requests).outcomes]


def test_the_lock_file_names_the_version_that_we_look_for() -> None:
    assert f"{PACKAGE}=={VERSION} " in (ROOT / "requirements" / "embed.lock").read_text()


@needs_package
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["text"][:20])
def test_texts_have_the_golden_ids_and_vectors(engine, tokenizer, golden) -> None:
    ids = tokenizer.encode(golden["text"]).ids
    assert ids == golden["ids"]
    (vector,) = embed(engine, ids)
    assert vector.shape == (384,)
    assert np.abs(vector[:8] - golden["first"]).max() < 1e-5


@needs_package
def test_like_means_alike(engine) -> None:
    first, second, other, _ = embed(engine, *(golden["ids"] for golden in GOLDEN))
    assert first @ second == pytest.approx(0.678, abs=1e-3)
    assert abs(first @ other) < 0.1


@needs_package
def test_a_vector_does_not_depend_on_its_batch(engine) -> None:
    alone = [embed(engine, golden["ids"])[0] for golden in GOLDEN]
    many = embed(
        engine, *([101, *([2773] * n), 102] for n in (100, 254)), *(g["ids"] for g in GOLDEN)
    )
    assert np.abs(np.array(alone) - np.array(many[2:])).max() < 1e-4


@needs_package
def test_long_texts_are_refused_not_cut(engine, tokenizer) -> None:
    ids = tokenizer.encode("word " * 300).ids
    assert len(ids) == 302
    assert engine.limits.tokens_max == 256
    (outcome,) = engine.embed([np.array([ids], np.int32)]).outcomes
    assert "302 tokens" in outcome.message
    assert "256" in outcome.message
