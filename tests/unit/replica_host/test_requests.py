import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.types import (
    URGENT_PRIORITY,
    Fork,
    Grammar,
    GrammarKind,
    RefusedError,
    Sampling,
    SequenceRequest,
)
from replica.host.received_spans import ReceivedSpans
from replica.host.requests import decode_hashes, decode_sequence, prompt_tokens
from sluice.errors import ErrorCode
from sluice.hashing import cache_root
from sluice.token_ids import packed_ids
from sluice.wire.engine.v1 import engine_pb2 as wire


def decode(message: wire.Sequence) -> SequenceRequest:
    seeds = itertools.count(900)
    return decode_sequence(
        message,
        list(range(10, 11 + len(message.forks))),
        base_digest="base",
        spans=ReceivedSpans(64),
        seen_at_s=2.5,
        entropy=lambda: next(seeds),
    )


def test_an_absent_field_is_off() -> None:
    request = decode(wire.Sequence(id=1, prompt=[1, 2], output_tokens_max=3))
    assert request == SequenceRequest(
        10, array("I", [1, 2]), 3, sampling=Sampling(seed=900), submitted_at_s=2.5, hashes=[]
    )
    sampling = wire.Sampling(top_p=0, repetition_penalty=0)
    assert decode(wire.Sequence(prompt=[1], sampling=sampling)).sampling == Sampling(seed=900)


RESUMED = {"resumed_tokens": 2, "prompt_logprobs": 0, "draft_tokens_max": 4, "prediction": (7, 8)}
TRACE = {"traceparent": "00-t-s-01", "tracestate": "v=1"}


def test_an_answer_that_is_scored_is_not_reported_token_by_token() -> None:
    message = wire.Sequence(prompt=[1, 2, 3], scored_tokens=2, prompt_logprobs=5)
    assert (decode(message).scored_tokens, decode(message).prompt_logprobs) == (2, 0)


def test_every_field_arrives() -> None:
    sampling = wire.Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=0,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        bias_token=[4, 9],
        logit_bias=[-100, 2.5],
        tokens_min=3,
        logprobs=0,
        grammar=wire.Grammar(kind=wire.Grammar.KIND_REGEX, text="a+"),
    )
    message = wire.Sequence(
        id=5,
        prompt=[1, 2, 3],
        output_tokens_max=9,
        stop_token_ids=[8, 8, 6],
        sampling=sampling,
        cache_root=b"c" * 16,
        adapter_digest="a" * 64,
        priority=2**32 - 1,
        ignore_eos=True,
        **RESUMED,
        **TRACE,
    )
    assert decode(message) == SequenceRequest(
        key=10,
        prompt=array("I", [1, 2, 3]),
        hashes=[],
        output_tokens_max=9,
        stop_token_ids=frozenset({6, 8}),
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            seed=0,
            min_p=0.125,
            presence_penalty=1.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            logit_bias=((4, -100.0), (9, 2.5)),
            tokens_min=3,
            logprobs=0,
            grammar=Grammar(GrammarKind.REGEX, "a+"),
        ),
        cache_root=b"c" * 16,
        adapter_digest="a" * 64,
        priority=URGENT_PRIORITY - 1,
        ignore_eos=True,
        submitted_at_s=2.5,
        **RESUMED,
        trace=TRACE,
    )


def test_forks_get_keys_and_seeds() -> None:
    forks = [wire.Fork(id=7, seed=0), wire.Fork(id=8)]
    request = decode(wire.Sequence(id=6, prompt=[1], forks=forks))
    assert request.forks == (Fork(11, 0), Fork(12, 900))
    assert request.sampling.seed == 901


def test_an_adapter_without_a_root_does_not_share_the_kv_values_of_its_base() -> None:
    request = decode(wire.Sequence(prompt=[1], adapter_digest="a" * 64))
    assert request.cache_root == cache_root("base", "a" * 64, b"")
    assert decode(wire.Sequence(prompt=[1])).cache_root == b""


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (wire.Grammar.KIND_JSON, GrammarKind.JSON),
        (wire.Grammar.KIND_JSON_SCHEMA, GrammarKind.JSON_SCHEMA),
        (wire.Grammar.KIND_REGEX, GrammarKind.REGEX),
        (wire.Grammar.KIND_CHOICE, GrammarKind.CHOICE),
        (wire.Grammar.KIND_EBNF, GrammarKind.EBNF),
    ],
)
def test_every_kind_of_grammar_has_its_name(number: int, kind: GrammarKind) -> None:
    sampling = wire.Sampling(grammar=wire.Grammar(kind=number, text="x"))
    assert decode(wire.Sequence(sampling=sampling)).sampling.grammar == Grammar(kind, "x")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (wire.Sampling(grammar=wire.Grammar(text="x")), "grammar kind 0"),
        (wire.Sampling(grammar=wire.Grammar(kind=99)), "grammar kind 99"),
        (wire.Sampling(bias_token=[1, 2], logit_bias=[1]), "2 tokens have a bias and 1 value"),
        (wire.Sampling(logit_bias=[1]), "0 tokens have a bias and 1 value"),
        (wire.Sampling(bias_token=[1, 1], logit_bias=[1, 2]), "more than one bias"),
    ],
)
def test_garbage_is_refused_with_the_correction(sampling: wire.Sampling, message: str) -> None:
    with pytest.raises(RefusedError, match=message) as caught:
        decode(wire.Sequence(prompt=[1], sampling=sampling))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_ids_are_the_ids_of_the_prompt(ids: list[int]) -> None:
    message = wire.Sequence(prompt_ids=packed_ids(ids), output_tokens_max=3)
    assert list(decode(message).prompt) == ids
    assert prompt_tokens(message) == len(ids)


def test_an_incomplete_id_is_refused_with_the_size_of_an_id() -> None:
    with pytest.raises(RefusedError, match="prompt_ids has 7 bytes; send 4") as error:
        decode(wire.Sequence(prompt_ids=b"1234567", output_tokens_max=3))
    assert (error.value.code, error.value.param) == (ErrorCode.INVALID_REQUEST, "prompt")


def test_a_root_longer_than_a_root_can_be_is_refused_with_its_size() -> None:
    with pytest.raises(RefusedError, match="cache_root has 100 bytes; send 16") as error:
        decode(wire.Sequence(prompt=[1] * 32, cache_root=b"x" * 100))
    assert error.value.code is ErrorCode.INVALID_REQUEST


def test_hashes_are_cut_apart_or_refused() -> None:
    assert decode_hashes(b"a" * 16 + b"b" * 16, 16, 2) == [b"a" * 16, b"b" * 16]
    for data in (b"a" * 17, b"a" * 48):
        with pytest.raises(RefusedError, match=r"send up to 2 of 16 bytes"):
            decode_hashes(data, 16, 2)
