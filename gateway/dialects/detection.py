"""Detects a base's dialect, from its configuration or else from its template and vocabulary. Pure.

Marks in the template or the vocabulary distinguish the forms. Without any mark, the form is that of
Hermes, which most templates use.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

from gateway.dialects.dialect import Dialect
from gateway.dialects.forms import CALL_MARKS, REASONING_MARKS, CallForm, ReasoningForm
from gateway.dialects.marks import ARGUMENTS, PYTHON_START, PYTHON_TAG, TOOL_CALL, TOOL_CALLS

_OVERRIDE_KEY = "sluice"
_PYTHONIC = re.compile(r"\[\s*func\w*\(|python list of the function calls")

Form = TypeVar("Form", bound=StrEnum)


def dialect_of(template: str, tokens: Mapping[str, int], config: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a base.

    Args:
        template: Source of the base's chat template.
        tokens: Added tokens of the base's tokenizer, by text.
        config: Content of tokenizer_config.json. Its entry `{"sluice": {"tool_calls": ...,
            "reasoning": ...}}` replaces the detection.

    Raises:
        ValueError: The config names a form that does not exist.
    """
    override: Any = config.get(_OVERRIDE_KEY) or {}
    if not isinstance(override, dict):
        raise ValueError(f"{_OVERRIDE_KEY!r} in tokenizer_config.json must be an object")  # noqa: TRY004 - about the file's content
    named = cast("dict[str, Any]", override)
    calls = _named(named, "tool_calls", CallForm) or _call_form(template, tokens)
    reasoning = _named(named, "reasoning", ReasoningForm) or _reasoning_form(template, tokens)
    marks = (*CALL_MARKS[calls], *REASONING_MARKS.get(reasoning, ()))
    return Dialect(calls, reasoning, {mark: tokens[mark] for mark in marks if mark in tokens})


def _named(override: Mapping[str, Any], key: str, forms: type[Form]) -> Form | None:
    if key not in override:
        return None
    try:
        return forms(override[key])
    except ValueError:
        known = ", ".join(forms)
        raise ValueError(
            f"{_OVERRIDE_KEY}.{key} in tokenizer_config.json is none of {known}"
        ) from None


def _call_form(template: str, tokens: Mapping[str, int]) -> CallForm:
    if TOOL_CALL in template:
        return CallForm.HERMES
    if TOOL_CALLS in template or TOOL_CALLS in tokens:
        # The template decides first, because the vocabulary may have marks for which the model was
        # not trained.
        is_named = ARGUMENTS in (template if TOOL_CALLS in template else tokens)
        return CallForm.MISTRAL_NAMED if is_named else CallForm.MISTRAL
    if any(mark in template or mark in tokens for mark in (PYTHON_TAG, PYTHON_START)):
        return CallForm.LLAMA_PYTHONIC if _PYTHONIC.search(template) else CallForm.LLAMA_JSON
    return CallForm.HERMES


def _reasoning_form(template: str, tokens: Mapping[str, int]) -> ReasoningForm:
    for form, marks in REASONING_MARKS.items():
        if any(mark in template or mark in tokens for mark in marks):
            return form
    return ReasoningForm.NONE
