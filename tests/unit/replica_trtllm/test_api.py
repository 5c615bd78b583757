import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.drivers.trtllm_api import choice_regex, classify
from replica.engine.types import Finish
from sluice.errors import ErrorCode


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), st.text(max_size=8))
def test_a_choice_matches_its_texts_and_nothing_else(choices, other) -> None:
    pattern = re.compile(choice_regex(json.dumps(choices)))
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert bool(pattern.fullmatch(other)) == (other in choices)


@pytest.mark.parametrize("text", ["yes", "[]", '["a", 1]', '{"a": 1}', '"a"'])
def test_invalid_choices_are_refused(text) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the errors of the JSON parser are among them
        choice_regex(text)


class RequestError(RuntimeError):
    """An error like that of TensorRT-LLM."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("Maximum queue size of 10"), Finish.BUSY),
        (RequestError("Error storing task=5 in PEFT cache -- Cache is full."), Finish.BUSY),
        (RequestError("prompt length (9) should not exceed max_num_tokens (8)"), Finish.REFUSED),
        (RequestError("LLGuidance matcher error: bad regex"), Finish.REFUSED),
        (ValueError("require 0 <= top_p <= 1"), Finish.REFUSED),
        (RequestError("CUDA error: an illegal memory access"), Finish.FAILED),
        (RuntimeError("LLM is shutting down"), Finish.FAILED),
        # the error does not belong to a single request
        (RuntimeError("should not exceed"), Finish.FAILED),
    ],
)
def test_errors_are_told_apart_by_kind_and_text(error, reason) -> None:
    found, code, message = classify(error, RequestError)
    assert found is reason
    codes = {
        Finish.BUSY: ErrorCode.ENGINE_BUSY,
        Finish.REFUSED: ErrorCode.ENGINE_REFUSED,
        Finish.FAILED: ErrorCode.ENGINE_FAILED,
    }
    assert code is codes[reason]
    assert message in str(error)


def test_a_message_for_people_has_no_stack_trace_and_an_end() -> None:
    error = RequestError("it broke\nStack trace:\n  File ...")
    assert classify(error, RequestError)[2] == "it broke"
    assert len(classify(RequestError("x" * 9999), RequestError)[2]) == 500
    assert classify(RequestError(), RequestError)[2] == "RequestError()"
