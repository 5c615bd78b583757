"""The form of a training sample, and the samples that may never be trained on.

The split is by content, not by seed: a sample is held out when the hash of its key says so. The
key is the question itself, lower case and without its last marks, unless a task names a stronger
one (a sum is held out in all its wordings). Training drops held-out samples, evaluation keeps
nothing else, so a prompt of the evaluation is never in the training data.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# One in sixteen: enough for 500 prompts of every task, little enough to cost no knowledge.
_HELD_OUT_ONE_IN = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One question with its only right answer.

    Attributes:
        task: Name of the task, the row of the evaluation report.
        messages: OpenAI messages; the last one is from the user or from a tool.
        answer: Text that the assistant has to write, without the end-of-turn token.
        tools: OpenAI tool definitions the system prompt has to show.
        key: Text that the split hashes. If empty, this is the text of the last user message.
    """

    task: str
    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Tool, ...] = field(default=())
    key: str = ""

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return next(m["content"] for m in reversed(self.messages) if m["role"] == "user")


def ask(task: str, question: str, answer: str, *, key: str = "") -> Sample:
    """Return a sample of one user turn without tools."""
    return Sample(task, ({"role": "user", "content": question},), answer, key=key)


def split_key(sample: Sample) -> str:
    """Return the text by which `sample` is assigned to training or evaluation."""
    return sample.key or normalised(sample.question)


def normalised(question: str) -> str:
    """Return the question in lower case, single spaced, without marks at its end."""
    return " ".join(question.lower().split()).rstrip(".!?: ")


def is_held_out(sample: Sample) -> bool:
    """Return whether `sample` belongs to the evaluation; the same on every machine."""
    digest = hashlib.sha256(split_key(sample).encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0
