"""What goes into embeddings and what comes out, without any replica."""

import asyncio
import base64
import json
import math
import threading
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bases.embedding import load_embedding_base
from gateway.bases.threads import PromptThreads
from gateway.embedding.inputs import TOKENS_MAX, check_lengths, token_ids
from gateway.embedding.vectors import rendered, shortened
from sluice.errors import BadRequestError, ErrorCode
from tests.support.scripted_embedder import write_embedding_base

_VECTORS = st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=64)


@given(_VECTORS, st.data())
def test_shortened_vectors_point_the_same_way_and_have_length_one(values, data) -> None:
    vector = array("f", values)
    count = data.draw(st.integers(1, len(values)))
    short = shortened(vector, count)
    assert len(short) == count
    if count == len(values):
        assert short == vector
        return
    length = math.hypot(*values[:count])
    if length > 1e-30:
        assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
        assert [v * length for v in short] == pytest.approx(values[:count], abs=1e-5)


def test_a_vector_that_is_zero_where_it_is_cut_stays_zero() -> None:
    assert list(shortened(array("f", [0.0, 0.0, 1.0]), 2)) == [0.0, 0.0]


@given(st.integers(0, 2047), _VECTORS)
def test_both_forms_hold_exactly_the_same_numbers(index, values) -> None:
    vector = array("f", values)
    plain = json.loads(rendered(index, vector, is_base64=False))
    packed = json.loads(rendered(index, vector, is_base64=True))
    assert plain == {"object": "embedding", "index": index, "embedding": list(vector)}
    assert array("f", base64.b64decode(packed["embedding"])) == vector
    assert packed["index"] == index


async def test_a_base_s_own_cutting_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = write_embedding_base(tmp_path, dimensions=4)
    base = load_embedding_base(tmp_path)
    texts = ["a", "a much longer text than the eight tokens of the file", "x " * 40_000]
    made = await token_ids(texts, base, owner="one", context_tokens_max=0)
    assert made == [tokenizer.encode(text).ids for text in texts]
    assert len(made[2]) == 40_002
    long = [tokenizer.encode("x " * 40_000).ids]
    kept = await token_ids(texts[2:], base, owner="one", context_tokens_max=9, tokens_kept=5)
    assert kept == [[*long[0][:4], long[0][-1]]]
    with pytest.raises(BadRequestError, match="more than 300000 tokens in one request"):
        await token_ids(texts[2:] * 9, base, owner="one", context_tokens_max=0)


async def test_large_texts_wait_for_their_owner_s_turn(tmp_path: Path) -> None:
    write_embedding_base(tmp_path, dimensions=4)
    may_go = threading.Event()
    with closing(PromptThreads()) as threads:
        base = load_embedding_base(tmp_path, threads)
        one: dict[str, Any] = {"owner": "one", "context_tokens_max": 0}
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):  # as many as work at once
                tasks.create_task(threads.run("one", may_go.wait))
            many = [tasks.create_task(token_ids(["x " * 40_000], base, **one)) for _ in range(9)]
            await asyncio.sleep(0)
            other = tasks.create_task(
                token_ids(["y " * 40_000], base, owner="two", context_tokens_max=0)
            )
            assert len(await token_ids(["small"], base, **one)) == 1
            may_go.set()
            await other
            assert sum(not it.done() for it in many) >= 6, "others came first, one after the other"


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_a_base_without_sizes_is_named(tmp_path: Path, name: str) -> None:
    write_embedding_base(tmp_path, dimensions=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: "many"}))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_embedding_base(tmp_path)


def test_lengths() -> None:
    check_lengths([[1] * 10, [1]], 10)
    check_lengths([[1] * 100_000], 0)
    for texts, code, param in (
        ([[1], [1] * 11, [1] * 12], ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input[1]"),
        ([[1] * 11], ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input"),
        ([[1], []], ErrorCode.INVALID_REQUEST, "input[1]"),
        ([[1] * 10] * (TOKENS_MAX // 10 + 1), ErrorCode.INVALID_REQUEST, "input"),
    ):
        with pytest.raises(BadRequestError) as caught:
            check_lengths(texts, 10)
        assert (caught.value.code, caught.value.param) == (code, param)
