"""The blocks of Anthropic's messages, and their translation into turns of a chat. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from gateway.bodies.fields import Elsewhere, Flag, ShortText, Text
from gateway.bodies.messages import MESSAGES_MAX, PARTS_MAX, FunctionCall, Message, ToolCall
from gateway.bodies.mistakes import bad_value

_ELSEWHERE = (
    *("image", "document", "search_result", "server_tool_use", "web_search_tool_result"),
    *("web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result"),
    *("text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result"),
    *("container_upload", "tool_reference", "compaction"),
)
_INSTEAD = "this server takes text, calls and their results"
_CallId = Annotated[str, Field(min_length=1, max_length=512)]


class _Block(BaseModel):
    """A block as clients send it. Unknown fields, such as `cache_control`, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TextBlock(_Block):
    """A block of text."""

    type: Annotated[Literal["text"], Elsewhere(*_ELSEWHERE, instead=_INSTEAD)]
    text: Text


class ThinkingBlock(_Block):
    """Reasoning of the model. A template that supports reasoning may show it to the model."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(_Block):
    """Reasoning that another server has encrypted. The prompt omits it."""

    type: Literal["redacted_thinking"]
    data: Text = ""


class ToolUseBlock(_Block):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: _CallId
    name: ShortText
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: _CallId
    content: (
        Text | Annotated[list[TextBlock], Field(fail_fast=True, max_length=PARTS_MAX)] | None
    ) = None
    is_error: Flag | None = None

    def text(self) -> str:
        """Return the result as one string, which begins with "Error:" if the call failed."""
        text = text_of(self.content or "")
        return f"Error: {text}" if self.is_error else text


_KINDS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


def _kind_of(value: Any) -> str:
    """Return a block's kind for the union. An unknown kind becomes `text`, which refuses it."""
    kind: object = None
    if isinstance(value, dict):
        kind = value.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return kind if isinstance(kind, str) and kind in _KINDS else "text"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind_of),
]
TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True, max_length=PARTS_MAX)]
_Blocks = Annotated[list[Block], Field(fail_fast=True, min_length=1, max_length=PARTS_MAX)]


class AnthropicMessage(_Block):
    """A message of Anthropic's API. Consecutive messages of one role form one turn.

    A message of the role `system` instructs the model from its place in the conversation on.
    """

    role: Literal["user", "assistant", "system"]
    content: Text | _Blocks

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return (TextBlock.model_construct(type="text", text=self.content),)
        return self.content


Messages = Annotated[
    list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)
]


def text_of(content: str | Sequence[TextBlock]) -> str:
    """Return a text, or the texts of blocks, as one string."""
    return content if isinstance(content, str) else "".join([block.text for block in content])


class _Turns:
    """Joins blocks into turns, or raises BadRequestError if their order is not valid."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: dict[str, str] = {}  # path in the body of each call without a result, by id
        self._role = ""

    def add(self, index: int, message: AnthropicMessage) -> None:
        at = f"messages[{index}].content"
        if message.role == "assistant":
            self._require_results()
            self._add_answer(at, message.blocks)
        elif message.role == "system":
            self._require_results()
            self._add_instruction(at, message.blocks)
        else:
            self._add_question(at, message.blocks)
        self._role = message.role

    def end(self) -> None:
        """End the last turn, or raise BadRequestError if it is the assistant's or lacks results."""
        self._require_results()
        if self._role == "assistant":
            raise bad_value(
                "messages",
                "the last message must not be the assistant's; no answer is prefilled here",
            )

    def _add_answer(self, at: str, blocks: Sequence[Block]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(blocks):
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case ToolUseBlock():
                    if block.id in self._open:
                        raise bad_value(
                            f"{at}[{number}].id",
                            "another call has this id; each call needs its own",
                        )
                    self._open[block.id] = f"{at}[{number}]"
                    arguments = orjson.dumps(block.input).decode()
                    call = FunctionCall.model_construct(name=block.name, arguments=arguments)
                    calls.append(ToolCall.model_construct(id=block.id, function=call))
                case ToolResultBlock():
                    raise bad_value(f"{at}[{number}].type", "send results in a message of the user")
                case _:
                    pass
        self.messages.append(
            Message.model_construct(
                role="assistant",
                content="".join(texts),
                reasoning_content="".join(thoughts) or None,
                tool_calls=calls or None,
            )
        )

    def _add_instruction(self, at: str, blocks: Sequence[Block]) -> None:
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        if len(texts) < len(blocks):
            raise bad_value(at, "a system message has only blocks of the type 'text'")
        self.messages.append(Message.model_construct(role="system", content=text_of(texts)))

    def _add_question(self, at: str, blocks: Sequence[Block]) -> None:
        texts: list[str] = []
        for number, block in enumerate(blocks):
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ToolResultBlock():
                    if self._open.pop(block.tool_use_id, None) is None:
                        raise bad_value(
                            f"{at}[{number}].tool_use_id",
                            "the message before it has no call with this id",
                        )
                    self.messages.append(
                        Message.model_construct(
                            role="tool", content=block.text(), tool_call_id=block.tool_use_id
                        )
                    )
                case _:
                    raise bad_value(
                        f"{at}[{number}].type", "only messages of the assistant have this type"
                    )
        self._require_results()
        if texts:
            self._add_user_text("\n".join(texts))

    def _add_user_text(self, text: str) -> None:
        """Add text of the user. Consecutive user messages become one turn, as templates expect."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "user":
            text = f"{last.content}\n{text}"
            self.messages.pop()
        self.messages.append(Message.model_construct(role="user", content=text))

    def _require_results(self) -> None:
        if self._open:
            call_id, place = next(iter(self._open.items()))
            raise bad_value(
                place,
                f"the call '{call_id[:100]}' has no 'tool_result' in the message behind it",
            )


def turns_of(messages: Sequence[AnthropicMessage]) -> list[Message]:
    """Return the turns of a chat that are equivalent to the messages.

    Raises:
        BadRequestError: A call has no result, a result has no call, or the last turn is the
            assistant's.
    """
    turns = _Turns()
    for index, message in enumerate(messages):
        turns.add(index, message)
    turns.end()
    return turns.messages
