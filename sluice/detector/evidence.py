"""Kinds of evidence about a replica's answers, and the verdict on one answer.

Routers, agents and the control plane's quality guard send prompts to replicas and collect the
evidence. From the evidence `sluice.detector.record` derives the suspicion. The rules are in
docs/wrong-answers.md.
"""

from enum import StrEnum


class EvidenceKind(StrEnum):
    """The kind of prompt whose answer is evidence."""

    LIFE = "life"  # an agent's check that the right engine and base answered in time
    CANARY = "canary"  # a router's prompt, whose token ids are compared with the cell's answers
    GOLDEN = "golden"  # a golden prompt, whose logprobs are compared with the pool's answers


class AnswerVerdict(StrEnum):
    """The verdict on an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNANSWERED = "unanswered"  # there was no answer, so health checks decide
    UNJUDGED = "unjudged"  # the right answer is unknown
