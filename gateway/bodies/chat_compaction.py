"""Compacts chats, so that a summary replaces all messages before the last turn. Pure.

The summary is stored in the `compaction` of the assistant's next message. So it replaces all
messages before that message, except instructions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.bodies.messages import CompactedHistory, Message
from gateway.bodies.summaries import behind_summary
from gateway.bodies.truncation import INSTRUCTIONS, last_turn_of


class CompactedChat(NamedTuple):
    """The content of a compaction.

    Attributes:
        summary: Text of the summary, written by the model.
        kept: Messages that follow the summary unchanged.
    """

    summary: str
    kept: Sequence[Message]


class SplitChat(NamedTuple):
    """A chat to compact: `said` is replaced by a summary, and `kept` stays unchanged."""

    said: Sequence[Message]
    kept: Sequence[Message]


def expanded_chat(
    messages: Sequence[Message], opened: Callable[[int, CompactedHistory], CompactedChat]
) -> Sequence[Message]:
    """Return the messages for the prompt. The last compaction replaces the messages before it.

    Args:
        messages: Messages of the chat, oldest first.
        opened: Decrypts the compaction of the message with the given index, or raises an error
            that names the message.
    """
    for index in range(len(messages) - 1, -1, -1):
        compaction = messages[index].compaction
        if compaction is not None:
            compacted = opened(index, compaction)
            return summed_up(messages[:index], compacted.summary, compacted.kept, messages[index:])
    return messages


def split_chat(messages: Sequence[Message]) -> SplitChat | None:
    """Split a chat at its last turn, or return None if only instructions precede this turn."""
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
    """Return messages in which a summary replaces `before`, of which only instructions stay.

    If the next message is the user's, the summary becomes a part of that message. The reason is
    that templates of some models require that user and assistant alternate.
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
