"""Turns that give way where a context is too small for all of them."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bases.assets import EncodedPrompt
from gateway.bodies.messages import FunctionCall, Message, ToolCall
from gateway.bodies.truncation import prompt_room, turns_of, without_oldest
from gateway.endpoints.truncation import fitted
from sluice.errors import BadRequestError, ErrorCode

ROLES = st.lists(st.sampled_from(["user", "assistant", "call", "system"]), max_size=14)


def chat(roles: Sequence[str]) -> list[Message]:
    """A chat with an answered call for each `call`."""
    made: list[Message] = []
    for index, role in enumerate(roles):
        if role == "call":
            call = ToolCall(id=f"c{index}", function=FunctionCall(name="f", arguments="{}"))
            made.append(Message(role="assistant", content=None, tool_calls=[call]))
            made.append(Message(role="tool", content="r", tool_call_id=f"c{index}"))
        else:
            made.append(Message(role=role, content=f"{role} {index}"))
    return made


@given(ROLES, st.integers(0, 14))
def test_whole_turns_go_and_instructions_and_calls_stay_together(
    roles: list[str], turns: int
) -> None:
    messages = chat(roles)
    kept = without_oldest(messages, turns)
    system = [m for m in messages if m.role == "system"]
    assert [m for m in kept if m.role == "system"] == system
    positions = [next(i for i, m in enumerate(messages) if m is it) for it in kept]
    assert positions == sorted(positions)
    for index, message in enumerate(kept):
        if message.role == "tool":
            calling = [m for m in kept[:index] if m.tool_calls]
            assert message.tool_call_id == calling[-1].tool_calls[0].id
    assert turns_of(kept) <= max(0, turns_of(messages) - turns) + any(
        m.role == "assistant" for m in kept
    )
    if not turns:
        assert kept == messages


def test_a_turn_is_a_user_message_and_all_behind_it() -> None:
    messages = chat(["system", "user", "call", "assistant", "user", "user", "assistant", "user"])
    assert turns_of(messages) == 3
    assert [m.content for m in without_oldest(messages, 1)] == [
        *("system 0", "user 4", "user 5", "assistant 6", "user 7")
    ]
    assert [m.content for m in without_oldest(messages, 2)] == ["system 0", "user 7"]


class Encoder:
    """Takes 10 tokens per message; refuses what has very many."""

    def __init__(self, refused_from: int = 1000) -> None:
        self.looks = 0
        self._refused_from = refused_from

    async def __call__(self, messages: Sequence[Message]) -> EncodedPrompt:
        self.looks += 1
        if len(messages) >= self._refused_from:
            raise BadRequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "far too long")
        return EncodedPrompt(array("I", range(10 * len(messages))), b"")


@pytest.mark.parametrize("refused_from", [1000, 30])
async def test_as_many_turns_stay_as_fit(refused_from: int) -> None:
    messages = chat(["system", *["user", "assistant"] * 40, "user"])
    for room, wanted in ((2000, 0), (205, 31), (95, 37), (25, 40), (20, 40)):
        encode = Encoder(refused_from if wanted else 1000)
        prompt = await fitted(encode, messages, room)
        assert prompt.dropped_turns == wanted, room
        assert len(prompt.ids) <= room
        assert encode.looks <= 8


async def test_the_last_turn_is_never_dropped() -> None:
    messages: Any = chat(["user", "assistant", "user"])
    prompt = await fitted(Encoder(), messages, 5)
    assert (len(prompt.ids), prompt.dropped_turns) == (10, 1)
    with pytest.raises(BadRequestError):
        await fitted(Encoder(1), messages, 5)
    assert (await fitted(Encoder(), chat(["user"]), 5)).dropped_turns == 0


@pytest.mark.parametrize(
    ("context", "asked", "room"), [(256, None, 224), (256, 100, 156), (256, 300, 0), (4, None, 3)]
)
def test_the_answer_has_room(context: int, asked: int | None, room: int) -> None:
    assert prompt_room(context, asked) == room
