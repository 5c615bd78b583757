"""The answer of a replica to a canary."""

from dataclasses import dataclass

from sluice.detector.consensus import Text


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """An answer, and the question that it belongs to.

    Attributes:
        text: Tokens of the answer; none: the replica answered nothing.
        question: Number of the question; answers to different questions are not compared.
    """

    text: Text
    question: int = 0
