"""Compacts the items of a long conversation: a summary, and the last turn. Pure.

A compaction item stands for all items before it. Instructions among them stay: they are no part of
what was said.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.bodies.response_items import CompactionItem, InputItem, MessageItem
from gateway.bodies.summaries import behind_summary

_INSTRUCTIONS = frozenset({"system", "developer"})


class Compacted(NamedTuple):
    """The content of a compaction item.

    Attributes:
        summary: In the model's words.
        kept: Items that stand behind the summary as they were.
    """

    summary: str
    kept: Sequence[InputItem]


def expanded(
    items: Sequence[InputItem], opened: Callable[[int, CompactionItem], Compacted]
) -> list[InputItem]:
    """Return items as a model is shown them: what the last compaction says, and what is behind it.

    Args:
        items: Oldest first.
        opened: Opens an item, by its place; raises the caller's error if it cannot.
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
    """Return whether an item is no part of what was said."""
    return isinstance(item, MessageItem) and item.role in _INSTRUCTIONS


def has_compaction(items: Sequence[InputItem]) -> bool:
    """Return whether one of the items is a compaction, which replaces other items."""
    return _last_compaction(items) is not None


def last_turn(items: Sequence[InputItem]) -> int:
    """Return where the last turn begins: with the last that a user says in a row.

    Everything, where no user says anything; so that no call is parted from its result.
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
    """Return items behind a summary; where a user speaks first, it is part of that.

    Templates of some models want user and assistant in turns.
    """
    first = items[0] if items else None
    if isinstance(first, MessageItem) and first.role == "user":
        said = MessageItem(role="user", content=behind_summary(summary, first.text()))
        return [said, *items[1:]]
    return [MessageItem(role="user", content=behind_summary(summary)), *items]
