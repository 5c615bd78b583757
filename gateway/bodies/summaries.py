"""Summaries that replace earlier messages: the condition for writing them, and their text. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.bodies.fields import Integer, ModelName
from gateway.bodies.parsing import Strict

# The prompt for a summary is fixed, so that all summaries have the same kinds of content.
SUMMARY_PROMPT = (
    "Summarise our conversation so far for a reader who goes on with it and sees nothing else."
    " Keep the goal, decisions, facts, names, numbers, open questions, and the results of calls."
    " Leave out greetings and what is settled and not needed any more. Answer with the summary"
    " alone."
)
_OPENING = "Summary of our conversation so far:\n"


class CompactionPolicy(Strict):
    """The number of prompt tokens above which a summary is written, and the model for it."""

    type: Literal["compaction"]
    compact_threshold: Annotated[Integer, Field(ge=1, le=1 << 30)] | None = None
    model: ModelName | None = None


ContextManagement = Annotated[list[CompactionPolicy], Field(fail_fast=True, max_length=1)]


def behind_summary(summary: str, said: str = "") -> str:
    """Return a user message's text, which begins with the summary of all earlier messages."""
    return f"{_OPENING}{summary}\n\n{said}" if said else f"{_OPENING}{summary}"
