"""The items of a response's input, and their translation into messages of a chat. Pure.

The reasoning, text and calls of one answer are separate items, but belong to one message of a chat.
So consecutive items of the assistant become one message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from gateway.bodies.fields import ShortText, Text
from gateway.bodies.mcp_items import (
    DENIED,
    ApprovalRequestItem,
    ApprovalResponseItem,
    ListedToolsItem,
    ServerCallItem,
)
from gateway.bodies.messages import MESSAGES_MAX, PARTS_MAX, FunctionCall, Message, ToolCall
from gateway.bodies.mistakes import bad_value
from gateway.bodies.tool_results import failed, function_name, marked

_CallId = Annotated[str, Field(min_length=1, max_length=512)]


class _Item(BaseModel):
    """An item that clients or SDKs send back as they received it. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InputText(_Item):
    """A piece of text for the model."""

    type: Literal["input_text"]
    text: Text


class OutputText(_Item):
    """A piece of the model's text."""

    type: Literal["output_text"]
    text: Text


class RefusalText(_Item):
    """A text in which the model refused to answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The refusal's text, under the name that other pieces use for their text."""
        return self.refusal


class ReasoningText(_Item):
    """A piece of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class SummaryText(_Item):
    """A summary of reasoning. Prompts omit it."""

    type: Literal["summary_text"]
    text: Text


_MessagePart = Annotated[InputText | OutputText | RefusalText, Field(discriminator="type")]
_Parts = Annotated[list[_MessagePart], Field(fail_fast=True, max_length=PARTS_MAX)]
_Results = Annotated[list[InputText], Field(fail_fast=True, max_length=PARTS_MAX)]


class _NamedItem(_Item):
    """An item with an optional id, which the server sets when it sends the item to a client."""

    id: ShortText | None = None


class MessageItem(_NamedItem):
    """A message, whose `type` is optional."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | _Parts
    phase: Literal["commentary", "final_answer"] | None = None

    def text(self) -> str:
        """Return the content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])


class CallItem(_NamedItem):
    """A tool call of the model. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: _CallId
    name: ShortText
    arguments: Text


class ResultItem(_NamedItem):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: _CallId
    output: Text | _Results

    def text(self) -> str:
        """Return the output as one string."""
        if isinstance(self.output, str):
            return self.output
        return "".join([part.text for part in self.output])


class ReasoningItem(_NamedItem):
    """The model's reasoning."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=PARTS_MAX)] = []
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=PARTS_MAX)] | None = (
        None
    )

    def text(self) -> str:
        """Return the content as one string, or empty if the item has only a summary."""
        return "".join([part.text for part in self.content or ()])


class CompactionItem(_NamedItem):
    """An item that replaces all items before it. `CompactionSeals` has encrypted its content."""

    type: Literal["compaction"]
    encrypted_content: Text


class ItemReference(_Item):
    """A reference to an item that is stored with earlier responses or with the conversation."""

    type: Literal["item_reference"]
    id: ShortText


def _kind(value: Any) -> str | None:
    """Return the kind of an item."""
    if isinstance(value, dict):
        kind = value.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if kind is None and "role" in value:
            return "message"
        return kind if isinstance(kind, str) else None
    return getattr(value, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ListedToolsItem, Tag("mcp_list_tools")]
    | Annotated[ServerCallItem, Tag("mcp_call")]
    | Annotated[ApprovalRequestItem, Tag("mcp_approval_request")]
    | Annotated[ApprovalResponseItem, Tag("mcp_approval_response")],
    Discriminator(_kind),
]
PlainItem = MessageItem | CallItem | ResultItem | ReasoningItem | ItemReference
InputItems = Annotated[list[InputItem], Field(fail_fast=True, max_length=MESSAGES_MAX)]
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


@dataclass(slots=True)
class _Turn:
    """The message of the assistant that is being joined. A field is None until an item sets it."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    @property
    def is_empty(self) -> bool:
        return self.content is None and self.reasoning is None and not self.calls

    def takes(self, item: MessageItem | CallItem | ReasoningItem) -> bool:
        """Return whether an item can join this message, which has one text and then only calls."""
        return isinstance(item, CallItem) or self.content is None or bool(self.calls)

    def add(self, item: MessageItem | CallItem | ReasoningItem) -> None:
        if isinstance(item, ReasoningItem):
            self.reasoning = (self.reasoning or "") + item.text()
        elif isinstance(item, CallItem):
            call = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
            self.calls.append(ToolCall.model_construct(id=item.call_id, function=call))
        else:
            self.content = (self.content or "") + item.text()

    def message(self) -> Message:
        return Message.model_construct(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning or None,
            tool_calls=self.calls or None,
        )


class ItemTurns:
    """Joins items into messages of a chat, or raises BadRequestError if their order is invalid.

    Attributes:
        messages: The messages that are complete.
    """

    def __init__(self, param: str = "input") -> None:
        """Begin without items. `param` is the body's field that contains the items, for errors."""
        self._param = param
        self.messages: list[Message] = []
        self._turn = _Turn()
        # Index of the item of each call that has no result yet, by call id.
        self._open: dict[str, int] = {}
        self._with_output: set[str] = set()
        # Executed calls, by the ids of their approval requests.
        self._ran: dict[str, ServerCallItem] = {}

    def copy(self) -> "ItemTurns":
        """Return an independent copy, to which other items can be added."""
        made = ItemTurns(self._param)
        made.messages = [*self.messages]
        made._turn = replace(self._turn, calls=[*self._turn.calls])
        made._open, made._with_output = dict(self._open), {*self._with_output}
        made._ran = dict(self._ran)
        return made

    def take(self, items: Sequence[InputItem], start: int) -> None:
        """Add items, with indices from `start` on. Items of earlier turns have negative indices."""
        self._ran |= {
            it.approval_request_id: it
            for it in items
            if isinstance(it, ServerCallItem) and it.approval_request_id
        }
        for index, item in enumerate(items, start):
            for plain in _plain(item, self._ran):
                self._add(index, plain)

    def _add(self, index: int, item: PlainItem) -> None:
        at = f"{self._param}[{index}]"
        if isinstance(item, ItemReference):
            raise bad_value(f"{at}.type", "send the item itself: references are not supported here")
        if isinstance(item, ResultItem):
            self._add_result(at, item)
            return
        if self._open and not self._turn.calls:
            raise self._missing_output()
        if isinstance(item, MessageItem) and item.role != "assistant":
            self.end_turn()
            _require_input_parts(at, item)
            message = Message.model_construct(role=item.role, content=item.text())
            self.messages.append(message)
            return
        if not self._turn.takes(item):
            self.end_turn()
        if isinstance(item, CallItem):
            if item.call_id in self._open or item.call_id in self._with_output:
                raise bad_value(
                    f"{at}.call_id", "another call has this id; each call needs its own"
                )
            self._open[item.call_id] = index
        self._turn.add(item)

    def _add_result(self, at: str, item: ResultItem) -> None:
        if item.call_id in self._with_output:
            raise bad_value(f"{at}.call_id", "this call has an output already; send one")
        if item.call_id not in self._open:
            raise bad_value(
                f"{at}.call_id", f"no item before it is the call '{item.call_id[:100]}'"
            )
        self._close_turn()
        del self._open[item.call_id]
        self._with_output.add(item.call_id)
        self.messages.append(
            Message.model_construct(role="tool", content=item.text(), tool_call_id=item.call_id)
        )

    def end_turn(self) -> None:
        """End the assistant's message, or raise BadRequestError if a call has no result."""
        if self._open:
            raise self._missing_output()
        self._close_turn()

    def _close_turn(self) -> None:
        if not self._turn.is_empty:
            self.messages.append(self._turn.message())
            self._turn = _Turn()

    def _missing_output(self) -> Exception:
        call_id, index = next(iter(self._open.items()))
        return bad_value(
            self._param if index < 0 else f"{self._param}[{index}].call_id",
            f"No tool output found for function call '{call_id[:100]}': its"
            " 'function_call_output' must follow before the next message",
        )


def _require_input_parts(at: str, item: MessageItem) -> None:
    for number, part in enumerate(() if isinstance(item.content, str) else item.content):
        if not isinstance(part, InputText):
            raise bad_value(
                f"{at}.content[{number}].type", "only messages of the assistant have this type"
            )


def messages_of(
    items: Sequence[InputItem],
    before: Sequence[InputItem] = (),
    param: str = "input",
    begun: ItemTurns | None = None,
) -> list[Message]:
    """Return the messages of a chat that are equivalent to the items.

    Args:
        items: Items in the order of the conversation.
        before: Items of earlier turns, which `items` continue.
        param: Name of the body's field for `items`.
        begun: The joined items of `before`, or None to join them here.

    Raises:
        BadRequestError: A call has no output, an output has no call, or ids are not unique.
    """
    if begun is None or answers_earlier(items):
        turns = ItemTurns(param)
        turns.take([*before, *items], -len(before))
    else:
        turns = begun.copy()
        turns.take(items, 0)
    turns.end_turn()
    return turns.messages


def answers_earlier(items: Sequence[InputItem]) -> bool:
    """Return whether an item is an executed call that was approved in an earlier turn."""
    answered = {it.approval_request_id for it in items if isinstance(it, ApprovalResponseItem)}
    return any(
        isinstance(it, ServerCallItem) and it.approval_request_id not in {None, *answered}
        for it in items
    )


def _plain(item: InputItem, ran: Mapping[str, ServerCallItem]) -> Iterator[PlainItem]:
    """Yield an item in the form for a chat, which has calls and results but no approvals.

    The result of an approved call is yielded at the place of the approval, so that the result
    follows the call.

    Args:
        item: The item.
        ran: Executed calls, by the ids of their approval requests.
    """
    assert not isinstance(item, CompactionItem), "it was opened"
    match item:
        case ListedToolsItem():
            return
        case ServerCallItem(approval_request_id=asked) if asked:
            return
        case ServerCallItem():
            yield _server_call(item)
            yield _result(item.id, item)
        case ApprovalRequestItem():
            yield _server_call(item)
        case ApprovalResponseItem(approval_request_id=asked, approve=True):
            yield _result(asked, ran.get(asked))
        case ApprovalResponseItem(approval_request_id=asked, reason=reason):
            text = f"[{DENIED}: {reason}]" if reason else f"[{DENIED}]"
            yield ResultItem(type="function_call_output", call_id=asked, output=text)
        case _:
            yield item


def _server_call(item: ServerCallItem | ApprovalRequestItem) -> CallItem:
    return CallItem(
        type="function_call",
        call_id=item.id,
        name=function_name(item.name),
        arguments=item.arguments,
    )


def _result(call_id: str, item: ServerCallItem | None) -> ResultItem:
    """Return a server tool's result for the model, which is empty if the call has not yet run."""
    if item is None:
        text = ""
    elif item.failure is not None:
        text = failed(item.name, item.failure)
    else:
        text = marked(item.name, item.output or "")
    return ResultItem(type="function_call_output", call_id=call_id, output=text)


def open_approvals(
    before: Sequence[InputItem], items: Sequence[InputItem], param: str = "input"
) -> list[tuple[ApprovalRequestItem, ApprovalResponseItem]]:
    """Return the calls to run: those that this turn approves and that have not run yet.

    Raises:
        BadRequestError: An answer has no approval request, or its request has been answered before.
    """
    if not any(isinstance(it, ApprovalResponseItem) for it in items):
        return []
    everything = [*before, *items]
    asked = {it.id: it for it in everything if isinstance(it, ApprovalRequestItem)}
    answered = {it.approval_request_id for it in before if isinstance(it, ApprovalResponseItem)}
    ran = {it.approval_request_id for it in everything if isinstance(it, ServerCallItem)}
    found: list[tuple[ApprovalRequestItem, ApprovalResponseItem]] = []
    for index, it in enumerate(items):
        if not isinstance(it, ApprovalResponseItem):
            continue
        name = it.approval_request_id
        at = f"{param}[{index}].approval_request_id"
        if name not in asked:
            raise bad_value(at, f"no item before it is the request '{name[:100]}'")
        if name in answered:
            raise bad_value(at, "this request has an answer already; send one")
        answered.add(name)
        if it.approve and name not in ran:
            found.append((asked[name], it))
    return found


def read_items(kept: Any) -> list[InputItem]:
    """Return items from their stored form, which `stored_items` has written."""
    return _ITEMS.validate_python(kept)


def stored_items(items: Sequence[InputItem], stem: str) -> list[dict[str, Any]]:
    """Return items in their stored form, each with an id and a status."""
    told: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        assert not isinstance(item, ItemReference), "it was followed"
        prefix = _PREFIXES[item.type]
        fields = item.model_dump(exclude_none=True)
        own = {"id": item.id or f"{prefix}_{stem}i{index:02x}", **_status_of(item)}
        if isinstance(item, MessageItem):
            own["content"] = _output_parts(item)
        told.append(fields | own)
    return told


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "compaction": "cmp",
}


def _status_of(item: InputItem) -> dict[str, str]:
    if isinstance(item, ListedToolsItem | ApprovalRequestItem | ApprovalResponseItem):
        return {}
    is_failed = isinstance(item, ServerCallItem) and item.error is not None
    return {"status": "failed" if is_failed else "completed"}


def _output_parts(item: MessageItem) -> Any:
    kind = "output_text" if item.role == "assistant" else "input_text"
    if isinstance(item.content, str):
        parts: list[dict[str, Any]] = [{"type": kind, "text": item.content}]
    else:
        parts = [part.model_dump() for part in item.content]
    for part in parts:
        if part["type"] == "output_text":
            part.update({"annotations": [], "logprobs": []})
    return parts
