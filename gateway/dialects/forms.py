"""The forms that are known, by the names under which a base can ask for them. Pure."""

from enum import StrEnum

from gateway.dialects.marks import ReasoningMarks


class CallForm(StrEnum):
    """How tool calls are written; see the parsers."""

    HERMES = "hermes"
    LLAMA_JSON = "llama_json"
    LLAMA_PYTHONIC = "llama_pythonic"
    MISTRAL = "mistral"  # a list of objects
    MISTRAL_NAMED = "mistral_named"  # the name, then the arguments
    NONE = "none"


class ReasoningForm(StrEnum):
    """How reasoning is set apart from the answer."""

    THINK = "think"
    MISTRAL = "mistral"
    NONE = "none"


CALL_MARKS = {
    CallForm.HERMES: ("<tool_call>", "</tool_call>"),
    CallForm.LLAMA_JSON: ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    CallForm.LLAMA_PYTHONIC: ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    CallForm.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    CallForm.MISTRAL_NAMED: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    CallForm.NONE: (),
}
REASONING_MARKS = {
    ReasoningForm.THINK: ReasoningMarks("<think>", "</think>"),
    ReasoningForm.MISTRAL: ReasoningMarks("[THINK]", "[/THINK]"),
}
