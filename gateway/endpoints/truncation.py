"""Fits prompts into a context, by omitting the oldest turns and counting them."""

from collections.abc import Awaitable, Callable, Sequence

from gateway.bases.assets import EncodedPrompt
from gateway.bodies.messages import Message
from gateway.bodies.truncation import turns_of, without_oldest
from sluice.errors import BadRequestError, ErrorCode

Encode = Callable[[Sequence[Message]], Awaitable[EncodedPrompt]]


async def fitted(encode: Encode, messages: Sequence[Message], room_tokens: int) -> EncodedPrompt:
    """Return a prompt with as many of the latest turns as fit. The last turn always stays.

    A binary search determines the number of turns. Each of its steps encodes one prompt.

    Args:
        encode: Encodes messages, or raises BadRequestError CONTEXT_LENGTH_EXCEEDED if they are far
            too long.
        messages: Whole conversation.
        room_tokens: Maximum number of tokens of the prompt.
    """
    whole = await _encoded(encode, messages)
    if whole is not None and len(whole.ids) <= room_tokens:
        return whole
    # Bounds of the number of turns to drop. The last turn is never dropped.
    least, most = 1, turns_of(messages) - 1
    best: EncodedPrompt | None = None
    while least <= most:
        turns = (least + most) // 2
        prompt = await _encoded(encode, without_oldest(messages, turns))
        if prompt is not None and len(prompt.ids) <= room_tokens:
            best, most = prompt._replace(dropped_turns=turns), turns - 1
        else:
            least = turns + 1
    if best is not None:
        return best
    last = max(0, turns_of(messages) - 1)
    prompt = await encode(without_oldest(messages, last) if last else messages)
    return prompt._replace(dropped_turns=last)


async def _encoded(encode: Encode, messages: Sequence[Message]) -> EncodedPrompt | None:
    """Return a prompt, or None if its number of characters alone shows that it cannot fit."""
    try:
        return await encode(messages)
    except BadRequestError as error:
        if error.code is not ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            raise
        return None
