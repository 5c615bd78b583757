"""Kinds of evidence about a replica's answers, and the verdict on one answer.

Routers, agents and the quality guard send prompts to replicas and collect the evidence, from which
`sluice.detector.record` derives the suspicion. docs/wrong-answers.md has the rules.
"""

from enum import StrEnum


class EvidenceKind(StrEnum):
    """The kind of prompt whose answer is evidence."""

    LIFE = "life"  # an agent's liveness check: the right engine and base answered in time
    CANARY = "canary"  # a router's prompt, compared by token ids with the answers of the cell
    GOLDEN = "golden"  # a golden prompt, compared with logprobs with the answers of the pool


class AnswerVerdict(StrEnum):
    """The verdict on an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNANSWERED = "unanswered"  # there was no answer, which is left to health checks
    UNJUDGED = "unjudged"  # the right answer is unknown
