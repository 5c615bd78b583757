"""Checks prompts and tool results against rules, before any token is computed.

Long texts are checked in pieces, so that the event loop can run other requests in between.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from gateway.guard.answer import Lane
from gateway.guard.findings import Findings
from gateway.guard.plan import GuardPlan
from gateway.texts.documents import TextTokens
from sluice.guard.rules import OF_REQUESTS, GuardTarget

_PIECE_CHARACTERS = 256
_STEP_S = 0.001  # seconds of work before the event loop can run other tasks
# Fields of messages, and of their parts, that contain text.
_TEXTS = ("content", "text", "reasoning_content", "refusal", "arguments", "function", "tool_calls")


class RequestFindings:
    """The matches of rules in a request.

    Attributes:
        blocked_by: Id of the rule that blocks the request, or empty.
        found: Number of matches by rule.
        unjudged: Classifiers that did not answer.
    """

    def __init__(self) -> None:
        self.blocked_by = ""
        self.found = Findings()
        self.unjudged = frozenset[str]()


def judges_requests(plan: GuardPlan) -> bool:
    """Return whether a plan has any rule for texts of requests, with or without classifier."""
    return not OF_REQUESTS.isdisjoint(plan.targets) or judges(plan)


def judges(plan: GuardPlan) -> bool:
    """Return whether a plan has rules with classifiers for texts of requests."""
    return not OF_REQUESTS.isdisjoint(plan.judged)


def texts_by_target(
    parts: Iterable[tuple[str, Iterable[object]]], plan: GuardPlan
) -> dict[GuardTarget, str]:
    """Return a request's texts for classifiers, joined to one text for each kind of text."""
    found = dict[GuardTarget, list[str]]()
    for name, values in parts:
        if name == "tools":
            continue
        for value in values:
            target = _target(value)
            if target in plan.judged:
                found.setdefault(target, []).append("".join(_strings(value)))
    return {target: "\n".join(texts) for target, texts in found.items()}


async def look_at(
    parts: Iterable[tuple[str, Iterable[object]]], plan: GuardPlan
) -> RequestFindings:
    """Return the matches of rules in the texts from `TextTask.texts`, up to the first block."""
    findings = RequestFindings()
    began_s = time.monotonic()
    for name, values in parts:
        if name == "tools":  # tool definitions are not checked
            continue
        for value in values:
            target = _target(value)
            if target not in plan.targets:
                continue
            lane = Lane(plan.targets[target])
            for piece in _pieces(value):
                lane.push(piece)
                if time.monotonic() - began_s > _STEP_S:
                    await asyncio.sleep(0)
                    began_s = time.monotonic()
                if lane.blocked_by:
                    break
            lane.flush()
            findings.found += lane.findings()
            findings.blocked_by = lane.blocked_by
            if findings.blocked_by:
                return findings
    return findings


def _target(value: object) -> GuardTarget:
    if isinstance(value, dict) and cast("Mapping[str, object]", value).get("role") == "tool":
        return GuardTarget.TOOL_RESULTS
    return GuardTarget.PROMPT


def _pieces(value: object) -> Iterator[str]:
    """Yield the text of a message or prompt in pieces. Parts are joined, as in templates."""
    for text in _strings(value):
        for at in range(0, len(text), _PIECE_CHARACTERS):
            yield text[at : at + _PIECE_CHARACTERS]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, TextTokens):
        delta = value.pipe.push(value.ids)
        yield delta.content + value.pipe.flush().content
    elif isinstance(value, list):
        for it in cast("list[object]", value):
            yield from _strings(it)
    elif isinstance(value, dict):
        fields = cast("Mapping[str, object]", value)
        for name in _TEXTS:
            yield from _strings(fields.get(name))
