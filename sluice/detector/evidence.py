"""The words of the detector: what evidence about the answers of a replica rests on, and its worth.

Routers, agents and the quality guard ask replicas. Each brings evidence; `sluice.detector.record`
says what it amounts to. docs/wrong-answers.md has the rules.
"""

from enum import StrEnum


class EvidenceKind(StrEnum):
    """The kind of an answer that is evidence."""

    LIFE = "life"  # an agent's sign of life: an answer, of the engine and base that are meant
    CANARY = "canary"  # a router's canary, compared with the cell's; token ids alone
    GOLDEN = "golden"  # a golden prompt, compared with the pool's; with logprobs


class AnswerVerdict(StrEnum):
    """The verdict on an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNANSWERED = "unanswered"  # health is judged elsewhere
    UNJUDGED = "unjudged"  # it is not known what is right
