"""The answer of a replica to a canary."""

from dataclasses import dataclass

from sluice.detector.consensus import Text


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A replica's answer to a canary prompt.

    Attributes:
        text: Tokens of the answer, or empty if the replica returned no tokens.
        question: Number of the canary prompt. Only answers to the same prompt are compared.
    """

    text: Text
    question: int = 0
