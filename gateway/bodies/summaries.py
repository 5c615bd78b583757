"""Summaries that replace earlier messages. Defines when they are written, and their text. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.bodies.fields import Integer, ModelName
from gateway.bodies.parsing import Strict

# The prompt is fixed, so that all summaries have the same kinds of content.
SUMMARY_PROMPT = (
    "Summarise our conversation so far for a reader who goes on with it and sees nothing else."
    " Keep the goal, decisions, facts, names, numbers, open questions, and the results of calls."
    " Leave out greetings and what is settled and not needed any more. Answer with the summary"
    " alone."
)
_OPENING = "Summary of our conversation so far:\n"


class CompactionPolicy(Strict):
    """Condition for a summary, which is a number of prompt tokens, and the model that writes it."""

    type: Literal["compaction"]
    compact_threshold: Annotated[Integer, Field(ge=1, le=1 << 30)] | None = None
    model: ModelName | None = None


ContextManagement = Annotated[list[CompactionPolicy], Field(fail_fast=True, max_length=1)]


def behind_summary(summary: str, said: str = "") -> str:
    """Return the text of a user message that begins with the summary of all earlier messages."""
    return f"{_OPENING}{summary}\n\n{said}" if said else f"{_OPENING}{summary}"
