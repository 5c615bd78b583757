"""Compacts the items of a long conversation into a summary and the last turn. Pure.

A compaction item replaces all items before it, except instructions. They stay, because a summary
covers only the conversation.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.bodies.response_items import CompactionItem, InputItem, MessageItem
from gateway.bodies.summaries import behind_summary

_INSTRUCTIONS = frozenset({"system", "developer"})


class Compacted(NamedTuple):
    """The content of a compaction item.

    Attributes:
        summary: Text of the summary, written by the model.
        kept: Items that follow the summary unchanged.
    """

    summary: str
    kept: Sequence[InputItem]


def expanded(
    items: Sequence[InputItem], opened: Callable[[int, CompactionItem], Compacted]
) -> list[InputItem]:
    """Return the items for the prompt. The last compaction replaces the items before it.

    Args:
        items: Items of the conversation, oldest first.
        opened: Decrypts the compaction item with the given index, or raises an error that names
            the item.
    """
    last = _last_compaction(items)
    if last is None:
        return list(items)
    index, item = last
    compacted = opened(index, item)
    before = [*items[:index], *compacted.kept]
    kept = [it for it in compacted.kept if not is_instruction(it)]
    said = _with_summary(compacted.summary, [*kept, *items[index + 1 :]])
    return [*(it for it in before if is_instruction(it)), *said]


def is_instruction(item: InputItem) -> bool:
    """Return whether an item is an instruction, which a compaction never replaces."""
    return isinstance(item, MessageItem) and item.role in _INSTRUCTIONS


def has_compaction(items: Sequence[InputItem]) -> bool:
    """Return whether an item is a compaction, so that `expanded` would change the items."""
    return _last_compaction(items) is not None


def last_turn(items: Sequence[InputItem]) -> int:
    """Return the index of the first user message of the last turn, or 0 without user messages.

    The turn contains all items from there on, so that no call is separated from its result.
    """
    start = 0
    for index, item in enumerate(items):
        is_said = isinstance(item, MessageItem) and item.role == "user"
        before = items[index - 1] if index else None
        was_said = isinstance(before, MessageItem) and before.role == "user"
        if is_said and not was_said:
            start = index
    return start


def _last_compaction(items: Sequence[InputItem]) -> tuple[int, CompactionItem] | None:
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, CompactionItem):
            return index, item
    return None


def _with_summary(summary: str, items: Sequence[InputItem]) -> list[InputItem]:
    """Return a summary followed by items. If the first item is a user message, they are joined.

    The reason is that templates of some models require that user and assistant alternate.
    """
    first = items[0] if items else None
    if isinstance(first, MessageItem) and first.role == "user":
        said = MessageItem(role="user", content=behind_summary(summary, first.text()))
        return [said, *items[1:]]
    return [MessageItem(role="user", content=behind_summary(summary)), *items]
