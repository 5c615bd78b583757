from array import array
from dataclasses import asdict, replace

import pytest

from replica.engine.types import (
    Capabilities,
    Fork,
    Grammar,
    GrammarKind,
    Limits,
    RefusedError,
    Sampling,
    SequenceRequest,
)
from replica.engine.validation import check_request

LIMITS = Limits(
    context_tokens_max=1000, sequences_max=8, step_tokens_max=64, kv_blocks=40, vocabulary=200
)
ALL = Capabilities(
    adapter_slots=2,
    adapter_rank_max=8,
    logprobs_max=5,
    has_prompt_logprobs=True,
    has_penalties=True,
    has_grammars=True,
    has_drafts=True,
    has_kv_transfer=True,
    has_scores=True,
)
NAN = float("nan")


def sampling(**values) -> dict:
    return {"sampling": Sampling(**values)}


def field_of(changes: dict) -> str:
    """Return the name of the field that was changed."""
    (name,) = changes
    if name != "sampling":
        return name
    plain, changed = asdict(Sampling()), asdict(changes["sampling"])
    return next(field for field, value in plain.items() if changed[field] != value)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"prompt": []}, "invalid_request", "empty"),
        ({"output_tokens_max": 0}, "invalid_request", "at least one"),
        ({"prompt": [200]}, "invalid_request", "vocabulary of 200"),
        ({"prompt": [-1]}, "invalid_request", "vocabulary of 200"),
        ({"prompt": array("I", [5, 200, 7])}, "invalid_request", "vocabulary of 200"),
        ({"prompt": [1] * 900, "output_tokens_max": 200}, "context_length_exceeded", "1000"),
        ({"prompt": [1] * 90}, "context_length_exceeded", "has 2"),
        ({"cache_root": b"short"}, "invalid_request", "5 bytes"),
        ({"stop_token_ids": frozenset(range(65))}, "invalid_request", "65"),
        ({"resumed_tokens": 2}, "invalid_request", r"2 is not in 0\.\.1"),
        ({"resumed_tokens": -1}, "invalid_request", "-1 is not"),
        ({"forks": tuple(Fork(k, 0) for k in range(2, 130))}, "invalid_request", "at most 127"),
        ({"forks": (Fork(1, 0),)}, "invalid_request", "same key"),
        ({"forks": (Fork(2, 0), Fork(2, 0))}, "invalid_request", "same key"),
        ({"draft_tokens_max": 17}, "invalid_request", r"17 is not in 0\.\.16"),
        ({"prompt_logprobs": 6}, "invalid_request", "at most 5"),
        ({"prompt_logprobs": -2}, "invalid_request", "-2 is negative"),
        ({"scored_tokens": 2}, "invalid_request", r"2 is not in 1\.\.1"),
        (sampling(temperature=NAN), "invalid_request", "temperature"),
        (sampling(temperature=-1), "invalid_request", "temperature"),
        (sampling(top_p=1.5), "invalid_request", "top_p"),
        (sampling(top_p=NAN), "invalid_request", "top_p"),
        (sampling(top_k=-1), "invalid_request", "top_k"),
        (sampling(min_p=1.5), "invalid_request", "min_p"),
        (sampling(presence_penalty=2.1), "invalid_request", r"2\.1 is not in -2\.\.2"),
        (sampling(frequency_penalty=NAN), "invalid_request", "frequency_penalty nan"),
        (sampling(repetition_penalty=0), "invalid_request", r"not in 0.01\.\.10"),
        (sampling(repetition_penalty=1e-45), "invalid_request", "repetition_penalty 1e-45"),
        (sampling(repetition_penalty=float("inf")), "invalid_request", "repetition_penalty inf"),
        (sampling(tokens_min=4), "invalid_request", r"4 is not in 0\.\.3"),
        (sampling(logprobs=6), "invalid_request", "at most 5"),
        (sampling(logit_bias=((200, 1.0),)), "invalid_request", "id 200 is outside"),
        (sampling(logit_bias=((5, 1.0), (5, 2.0))), "invalid_request", "id 5 is there twice"),
        (sampling(logit_bias=((5, 101.0),)), "invalid_request", r"101\.0 of id 5"),
        (sampling(logit_bias=((5, NAN),)), "invalid_request", "nan of id 5"),
        (sampling(logit_bias=((5, 0.0),) * 301), "invalid_request", "301 entries"),
        (
            sampling(grammar=Grammar(GrammarKind.REGEX, "x" * 65_537)),
            "invalid_request",
            "65537 bytes; at most 65536",
        ),
    ],
)
def test_a_request_no_engine_can_serve_is_refused_with_the_limit(changes, code, text) -> None:
    limits = replace(LIMITS, kv_blocks=2) if changes.get("prompt") == [1] * 90 else LIMITS
    values = {"key": 1, "prompt": [1, 2], "output_tokens_max": 3, **changes}
    with pytest.raises(RefusedError, match=text) as caught:
        check_request(SequenceRequest(**values), limits, ALL)
    assert caught.value.code == code
    assert caught.value.param == (field_of(changes) if code == "invalid_request" else "")


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"adapter_digest": "ab" * 32}, {"adapter_slots": 0}),
        ({"draft_tokens_max": 4}, {"has_drafts": False}),
        ({"prompt_logprobs": 0}, {"has_prompt_logprobs": False}),
        ({"prompt_logprobs": 0}, {"logprobs_max": 0}),
        ({"scored_tokens": 1}, {"has_scores": False}),
        (sampling(logprobs=0), {"logprobs_max": 0}),
        (sampling(presence_penalty=0.5), {"has_penalties": False}),
        (sampling(frequency_penalty=-0.5), {"has_penalties": False}),
        (sampling(repetition_penalty=1.5), {"has_penalties": False}),
        (sampling(min_p=0.1), {"has_penalties": False}),
        (sampling(tokens_min=2), {"has_penalties": False}),
        (sampling(logit_bias=((3, 1.0),)), {"has_penalties": False}),
        (sampling(grammar=Grammar(GrammarKind.JSON)), {"has_grammars": False}),
    ],
)
def test_a_request_one_engine_cannot_serve_is_refused_there_and_served_elsewhere(
    changes, missing
) -> None:
    request = SequenceRequest(1, [1, 2], 3, **changes)
    check_request(request, LIMITS, ALL)
    with pytest.raises(RefusedError) as caught:
        check_request(request, LIMITS, replace(ALL, **missing))
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == field_of(changes)


def test_a_resumed_answer_may_have_emitted_its_least_tokens_before() -> None:
    resumed = SequenceRequest(
        1, [1] * 10, 3, resumed_tokens=9, sampling=Sampling(tokens_min=12, logprobs=5)
    )
    check_request(resumed, LIMITS, ALL)


def test_the_backend_has_the_last_word(make_engine) -> None:
    engine = make_engine()

    def refuse(request: SequenceRequest) -> None:
        raise RefusedError("invalid_request", f"the grammar of {request.key} does not compile")

    engine._backend.check_request = refuse
    with pytest.raises(RefusedError, match="of 5 does not compile"):
        engine.add(SequenceRequest(5, [1], 1))
    assert not engine.has_work
