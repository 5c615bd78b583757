"""Compacts chats: a summary replaces all messages but those of the last turn. Pure.

The assistant's message that has a `compaction` is the answer to what was summed up. So the summary
stands for all messages before it, but for instructions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.bodies.messages import CompactedHistory, Message
from gateway.bodies.summaries import behind_summary
from gateway.bodies.truncation import INSTRUCTIONS, last_turn_of


class CompactedChat(NamedTuple):
    """The content of a compaction.

    Attributes:
        summary: In the model's words.
        kept: Messages that stand behind the summary as they were.
    """

    summary: str
    kept: Sequence[Message]


class SplitChat(NamedTuple):
    """A chat to compact: the messages that the summary replaces, and the messages that stay."""

    said: Sequence[Message]
    kept: Sequence[Message]


def expanded_chat(
    messages: Sequence[Message], opened: Callable[[int, CompactedHistory], CompactedChat]
) -> Sequence[Message]:
    """Return messages as a model is shown them: what the last compaction says, and what follows.

    Args:
        messages: Oldest first.
        opened: Opens a compaction, by its message's place; raises the caller's error if it cannot.
    """
    for index in range(len(messages) - 1, -1, -1):
        compaction = messages[index].compaction
        if compaction is not None:
            compacted = opened(index, compaction)
            return summed_up(messages[:index], compacted.summary, compacted.kept, messages[index:])
    return messages


def split_chat(messages: Sequence[Message]) -> SplitChat | None:
    """Split a chat into messages to summarise and the last turn, or None if nothing precedes it."""
    start = last_turn_of(messages)
    if not any(it.role not in INSTRUCTIONS for it in messages[:start]):
        return None
    return SplitChat(messages[:start], _said(messages[start:]))


def summed_up(
    before: Sequence[Message],
    summary: str,
    kept: Sequence[Message],
    behind: Sequence[Message] = (),
) -> list[Message]:
    """Return messages with a summary in place of what was said before; instructions stay.

    Where a user speaks first behind it, the summary is part of that: templates of some models want
    user and assistant in turns.
    """
    instructions = [it for it in before if it.role in INSTRUCTIONS]
    rest = [*_said(kept), *behind]
    if rest and rest[0].role == "user":
        text = behind_summary(summary, rest.pop(0).text())
    else:
        text = behind_summary(summary)
    return [*instructions, Message(role="user", content=text), *rest]


def _said(messages: Sequence[Message]) -> list[Message]:
    return [it for it in messages if it.role not in INSTRUCTIONS]
