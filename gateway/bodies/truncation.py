"""Chooses the turns of a chat to leave out if the context is too small for all of them. Pure.

A turn begins with a user's message and includes all following answers, calls and results. So a call
is never separated from its result. Instructions belong to no turn and are never left out.
"""

from collections.abc import Sequence

from gateway.bodies.messages import Message

INSTRUCTIONS = frozenset({"system", "developer"})
# If the request sets no bound, the context divided by this number is reserved for the answer.
_ROOM_PARTS = 8


def turns_of(messages: Sequence[Message]) -> int:
    """Return the number of turns."""
    return len(_starts(messages))


def last_turn_of(messages: Sequence[Message]) -> int:
    """Return the index of the last turn's first message, or 0 without a turn."""
    starts = _starts(messages)
    return starts[-1] if starts else 0


def without_oldest(messages: Sequence[Message], turns: int) -> list[Message]:
    """Return messages without the given number of the oldest turns. All instructions stay."""
    starts = _starts(messages)
    kept_from = starts[turns] if turns < len(starts) else len(messages)
    dropped_from = starts[0] if starts else len(messages)
    return [
        message
        for index, message in enumerate(messages)
        if index < dropped_from or index >= kept_from or message.role in INSTRUCTIONS
    ]


def prompt_room(context_tokens_max: int, output_tokens_max: int | None) -> int:
    """Return the number of prompt tokens that still leaves enough context for an answer."""
    answer = output_tokens_max or context_tokens_max // _ROOM_PARTS
    return max(0, context_tokens_max - max(1, answer))


def _starts(messages: Sequence[Message]) -> list[int]:
    """Return the index of each turn's first message. Consecutive user messages begin one turn."""
    starts, is_behind_user = list[int](), False
    for index, message in enumerate(messages):
        if message.role == "user" and not is_behind_user:
            starts.append(index)
        if message.role not in INSTRUCTIONS:
            is_behind_user = message.role == "user"
    return starts
