"""The events of a response with server tools, over several rounds. Pure.

The item of a call is opened while the model writes the call, and closed when the tool has answered.
Several calls can therefore be open at once. Ids never change, and numbers only increase.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from gateway.bodies.response_items import CompactionItem
from gateway.dialects.delta import CallDelta
from gateway.responses.document import ResponseFrame
from gateway.responses.events import OpenCall, ResponseEvents
from gateway.text.detokenizer import json_fragment
from gateway.tools.plan import ListedServer, PlannedTool
from gateway.tools.rounds import RoundCall


class _OpenServerCall(OpenCall):
    """A call of a server tool that is still being written."""

    __slots__ = ("tool",)

    def __init__(self, item_id: str, index: int, first: CallDelta, tool: PlannedTool) -> None:
        super().__init__(item_id, index, first)
        self.tool = tool

    def opening(self) -> list[tuple[str, bytes]]:
        item = server_call_item(self.item_id, self.tool, "", "in_progress")
        return [
            ("response.output_item.added", b'"item":%b' % item),
            ("response.mcp_call.in_progress", self._at),
        ]

    def delta(self, arguments: str) -> tuple[str, bytes]:
        _, fields = super().delta(arguments)
        return "response.mcp_call_arguments.delta", fields

    def closing(self) -> list[tuple[str, bytes]]:
        arguments = json_fragment(self.arguments)
        return [
            ("response.mcp_call_arguments.done", b'%b,"arguments":"%b"' % (self._at, arguments))
        ]

    def item(self, status: str) -> bytes:
        del status  # the tool has not answered yet
        return server_call_item(self.item_id, self.tool, self.arguments, "incomplete")


class _OpenApproval(_OpenServerCall):
    """A call that needs approval, whose event is sent when the call's arguments are complete."""

    __slots__ = ()

    def opening(self) -> list[tuple[str, bytes]]:
        return [("response.output_item.added", b'"item":%b' % self.item(""))]

    def closing(self) -> list[tuple[str, bytes]]:
        return []

    def item(self, status: str) -> bytes:
        del status  # an approval request has no status
        return orjson.dumps(
            {
                "id": self.item_id,
                "type": "mcp_approval_request",
                "server_label": self.tool.label,
                "name": self.tool.name,
                "arguments": self.arguments,
            }
        )


@dataclass(frozen=True, slots=True)
class _WaitingCall:
    """A running call, with the index of its item in the output and the item's content."""

    index: int
    tool: PlannedTool
    arguments: str
    approval_request_id: str | None = None


class ToolEvents(ResponseEvents):
    """Writes all events of one stream, over all rounds of its response.

    Attributes:
        round_calls: Calls of the current round, in order.
        round_reason: Finish reason of the current round.
    """

    __slots__ = ("_begun", "_held", "_tools", "_waiting", "round_calls", "round_reason")

    def __init__(
        self,
        frame: ResponseFrame,
        tools: Mapping[str, PlannedTool],
        servers: Sequence[ListedServer],
        *,
        will_be_stored: bool = False,
        compaction: CompactionItem | None = None,
    ) -> None:
        """The `servers` are the MCP servers whose tools were listed."""
        super().__init__(frame, will_be_stored=will_be_stored, compaction=compaction)
        self._tools = tools
        self._waiting: dict[str, _WaitingCall] = {}
        self._begun, self._held = False, b""
        self.round_calls: list[RoundCall] = []
        self.round_reason = ""
        for server in servers:
            self._held += self._listed(server)

    @property
    def deltas(self) -> bytes:
        """No sizes, because several items of the output may be open at once."""
        return b""

    @property
    def has_begun(self) -> bool:
        """Whether the first events were sent."""
        return self._begun

    def next_round(self, frame: ResponseFrame) -> "ToolEvents":
        """Return a writer for the next round. If that round is abandoned, its events are dropped.

        The first round that is not abandoned determines the response's `frame`.
        """
        made = copy.copy(self)
        if not self._begun:
            made._frame = frame  # noqa: SLF001 - a copy
        made._items, made._waiting = [*self._items], dict(self._waiting)  # noqa: SLF001 - a copy
        made.round_calls = []
        return made

    def first(self) -> bytes:
        """Return the events that begin the stream, which only the first round writes."""
        if self._begun:
            return b""
        self._begun = True
        held, self._held = self._held, b""
        return super().first() + held

    def finish(self, reason: str) -> bytes:
        """Return the events that close all open items, and store the round's finish reason."""
        self.round_reason = reason
        return super().finish(reason)

    def end_as(self, reason: str) -> None:
        """Set the reason of the response's end, which is a finish reason or a used-up budget."""
        self._reason = reason

    def output(self) -> list[bytes]:
        """Return the items of the output so far, as JSON."""
        return [*self._items]

    def begin_approved(self, request_id: str, tool: PlannedTool, arguments: str) -> str:
        """Open the item of an approved call, and return the item's id.

        The item's events are buffered until the stream begins.
        """
        index = len(self._items)
        item_id = self._frame.item_id("mcp", index)
        call = _OpenServerCall(item_id, index, CallDelta(0, arguments, item_id, tool.name), tool)
        call.delta(arguments)
        self._held += self._opened(call) + self._closed("completed")
        waiting = self._waiting[item_id]
        self._waiting[item_id] = _WaitingCall(index, tool, waiting.arguments, request_id)
        self.round_calls.clear()
        return item_id

    def answer(self, item_id: str, output: str, failure: str | None) -> bytes:
        """Return the events that end a call, or buffer them until the stream has begun."""
        waiting = self._waiting.pop(item_id)
        item = server_call_item(
            item_id,
            waiting.tool,
            waiting.arguments,
            "completed" if failure is None else "failed",
            output=output if failure is None else None,
            failure=failure,
            approval_request_id=waiting.approval_request_id,
        )
        self._items[waiting.index] = item
        at = b'"item_id":"%b","output_index":%d' % (item_id.encode(), waiting.index)
        name = "response.mcp_call.completed" if failure is None else "response.mcp_call.failed"
        done = b'"item":%b,"output_index":%d' % (item, waiting.index)
        events = self._event(name, at) + self._event("response.output_item.done", done)
        if self._begun:
            return events
        self._held += events
        return b""

    def _new_call(self, index: int, call: CallDelta) -> OpenCall:
        tool = self._tools.get(call.name)
        if tool is None:
            return super()._new_call(index, call)
        if tool.needs_approval:
            return _OpenApproval(self._frame.item_id("mcpr", index), index, call, tool)
        return _OpenServerCall(self._frame.item_id("mcp", index), index, call, tool)

    def _call(self, call: CallDelta) -> bytes:
        events = super()._call(call._replace(arguments=""))
        if not call.arguments:
            return events
        opened = self._open
        assert isinstance(opened, OpenCall), "it was just opened"
        event = opened.delta(call.arguments)
        return events if isinstance(opened, _OpenApproval) else events + self._event(*event)

    def _closed(self, status: str) -> bytes:
        call = self._open
        if not isinstance(call, OpenCall):
            return super()._closed(status)
        tool = call.tool if isinstance(call, _OpenServerCall) else None
        self.round_calls.append(RoundCall(call.item_id, call.arguments, tool))
        if tool is None or isinstance(call, _OpenApproval):
            return super()._closed(status)
        self._open = None
        self._waiting[call.item_id] = _WaitingCall(len(self._items), tool, call.arguments)
        self._items.append(call.item(status))
        return b"".join([self._event(*event) for event in call.closing()])

    def _listed(self, server: ListedServer) -> bytes:
        index = len(self._items)
        item_id = self._frame.item_id("mcpl", index)
        fields = {"id": item_id, "type": "mcp_list_tools", "server_label": server.label}
        error = {"error": server.error} if server.error else {"error": None}
        item = orjson.dumps(fields | {"tools": server.tool_items()} | error)
        self._items.append(item)
        at = b'"item_id":"%b","output_index":%d' % (item_id.encode(), index)
        empty = orjson.dumps(fields | {"tools": [], "error": None})
        name = "response.mcp_list_tools.failed" if server.error else ""
        return b"".join(
            [
                self._event(
                    "response.output_item.added", b'"item":%b,"output_index":%d' % (empty, index)
                ),
                self._event("response.mcp_list_tools.in_progress", at),
                self._event(name or "response.mcp_list_tools.completed", at),
                self._event(
                    "response.output_item.done", b'"item":%b,"output_index":%d' % (item, index)
                ),
            ]
        )


def server_call_item(
    item_id: str,
    tool: PlannedTool,
    arguments: str,
    status: str,
    *,
    output: str | None = None,
    failure: str | None = None,
    approval_request_id: str | None = None,
) -> bytes:
    """Return the item of a server tool's call, as JSON."""
    return orjson.dumps(
        {
            "id": item_id,
            "type": "mcp_call",
            "status": status,
            "server_label": tool.label,
            "name": tool.name,
            "arguments": arguments,
            "output": output,
            "error": failure,
            "approval_request_id": approval_request_id,
        }
    )
