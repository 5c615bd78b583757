"""The known forms of tool calls and reasoning, by their names in a base's configuration."""

from collections.abc import Mapping
from enum import StrEnum

from gateway.dialects.marks import (
    ARGUMENTS,
    CALL_ID,
    PYTHON_END,
    PYTHON_START,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    ReasoningMarks,
)


class CallForm(StrEnum):
    """The forms in which models write tool calls. Each form has a parser in this package."""

    HERMES = "hermes"
    LLAMA_JSON = "llama_json"
    LLAMA_PYTHONIC = "llama_pythonic"
    MISTRAL = "mistral"  # one mark, and then a list of objects
    MISTRAL_NAMED = "mistral_named"  # for each call a mark, the name and the arguments
    NONE = "none"


class ReasoningForm(StrEnum):
    """The forms in which models separate reasoning from the answer."""

    THINK = "think"
    MISTRAL = "mistral"
    NONE = "none"


_LLAMA = (PYTHON_TAG, PYTHON_START, PYTHON_END)
_MISTRAL = (TOOL_CALLS, ARGUMENTS, CALL_ID)
CALL_MARKS: Mapping[CallForm, tuple[str, ...]] = {
    CallForm.HERMES: (TOOL_CALL, TOOL_CALL_END),
    CallForm.LLAMA_JSON: _LLAMA,
    CallForm.LLAMA_PYTHONIC: _LLAMA,
    CallForm.MISTRAL: _MISTRAL,
    CallForm.MISTRAL_NAMED: _MISTRAL,
    CallForm.NONE: (),
}
REASONING_MARKS: Mapping[ReasoningForm, ReasoningMarks] = {
    ReasoningForm.THINK: ReasoningMarks("<think>", "</think>"),
    ReasoningForm.MISTRAL: ReasoningMarks("[THINK]", "[/THINK]"),
}
