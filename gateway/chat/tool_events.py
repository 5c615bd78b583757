"""The chunks of a chat completion with server tools, in one stream over several rounds. Pure.

A round is one run of the model. Together, the rounds of a completion are one choice with one id.
Calls of server tools are not sent as `tool_calls`, because the client would have to answer them.
When a call has ended, it is sent with its result in `executed_tools`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.bodies.messages import CompactedHistory, FunctionCall, Message, ToolCall
from gateway.bodies.tool_results import failed, marked
from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.text.detokenizer import json_fragment
from gateway.text.sse import DONE, ChatChunks, StreamHead, annotated
from gateway.tools.loop import LoopEnd
from gateway.tools.plan import ListedServer, PlannedTool
from gateway.tools.rounds import RoundCall

_BETWEEN_ROUNDS = "\n\n"
_BUDGETS = frozenset(LoopEnd)


class _MadeCall:
    """A tool call that the model has written in a round."""

    __slots__ = ("arguments", "call_id", "name", "shown_index", "tool")

    def __init__(self, first: CallDelta, tool: PlannedTool | None, shown_index: int) -> None:
        """Start from the first piece. `shown_index` is the index in the client's `tool_calls`."""
        self.call_id, self.name, self.arguments = first.call_id, first.name, ""
        self.tool, self.shown_index = tool, shown_index

    def told(self) -> dict[str, object]:
        """Return the call as an entry of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolChatChunks(ChatChunks):
    """Writes all chunks of one answer, over all its rounds.

    Attributes:
        round_calls: Calls of the current round, in order, once the round has ended.
        round_reason: Finish reason of the current round, once the round has ended.
        found: Matches of the tenant's rules in the latest round's answer, or None without a match.
        prompt_found: Matches of the rules in the prompt, or empty without a match.
        completion: Fields that identify the completion at the start of each chunk.
        named: Fields that identify the stored completion.
    """

    __slots__ = (
        *("_begun", "_calls", "_compaction", "_content", "_executed", "_is_parting", "_logprobs"),
        *("_messages", "_reason", "_reasoning", "_round_from", "_servers", "_tools", "_waiting"),
        *("completion", "found", "named", "prompt_found", "round_calls", "round_reason"),
    )

    def __init__(
        self,
        head: StreamHead,
        tools: Mapping[str, PlannedTool],
        servers: Sequence[ListedServer] = (),
        compaction: CompactedHistory | None = None,
    ) -> None:
        """Start before the first round.

        Args:
            head: Start of each chunk until the first round has begun.
            tools: The server's tools, by the function names that the model uses.
            servers: MCP servers whose tools were listed.
            compaction: Item that replaces earlier messages, or None if nothing was summarized.
        """
        super().__init__(head)
        self.completion, self._tools, self._servers = head, tools, servers
        self._compaction = None if compaction is None else compaction.model_dump()
        self.named = dict[str, object]()
        self._content, self._reasoning = bytearray(), list[str]()
        self._logprobs = list[object]()
        self._executed = list[dict[str, Any]]()
        self._messages = list[Message]()  # messages of ended rounds
        self._waiting = dict[str, _MadeCall]()
        self._calls = dict[int, _MadeCall]()  # calls of the current round, by index
        self._round_from = 0, 0  # lengths of text and reasoning at the start of the current round
        self._begun = self._is_parting = False
        self._reason = ""
        self.round_calls, self.round_reason = list[RoundCall](), ""
        self.found: dict[str, object] | None = None
        self.prompt_found = list[dict[str, object]]()

    # --- rounds -----------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the first chunk has been sent."""
        return self._begun

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of all ended rounds: the model's answers and the results of calls."""
        return self._messages

    def next_round(self, head: StreamHead, named: dict[str, object]) -> "ToolChatChunks":
        """Return a writer for the next round. If that round fails, its writer is dropped.

        The head of the completion is that of the first round that sends a chunk.
        """
        made = copy.copy(self)
        if not self._begun:
            ChatChunks.__init__(made, head)
            made.completion, made.named = head, named
        made._content, made._reasoning = self._content[:], [*self._reasoning]  # noqa: SLF001 - its own
        made._logprobs = [*self._logprobs]  # noqa: SLF001 - its own
        made._messages, made._calls = [*self._messages], {}  # noqa: SLF001 - its own
        made._round_from = len(self._content), len(self._reasoning)  # noqa: SLF001 - its own
        made._is_parting = bool(self._content)  # noqa: SLF001 - its own
        made.round_calls, made.round_reason = [], ""
        return made

    def first(self) -> bytes:
        """Return the chunk with the role, or nothing in later rounds."""
        if self._begun:
            return b""
        self._begun = True
        told = self._compaction
        first = super().first() if told is None else self.opened({"compaction": told})
        for server in self._servers:
            if server.error:
                entry = {"type": "mcp_list_tools", "server_label": server.label}
                first += self._executed_chunk(entry | {"error": server.error})
        return first

    # --- a round ----------------------------------------------------------------------------

    def parted(self) -> bytes:
        """Return the chunk that separates the texts of two rounds, or empty if none is needed."""
        if not self._is_parting:
            return b""
        self._is_parting = False
        part = json_fragment(_BETWEEN_ROUNDS)
        self._content += part
        return self.head + part + self.tail

    def add(self, fragment: bytes) -> None:
        """Record text that the stream sends without `delta`. It is escaped for a JSON string."""
        self._content += fragment

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return the chunk of a delta. Calls of server tools are recorded but not sent."""
        before = b""
        if delta.content:
            before = self.parted()
            self._content += json_fragment(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if logprobs is not None:
            entries: Any = logprobs["content"]
            self._logprobs += entries
        shown = delta._replace(
            calls=tuple([it for call in delta.calls for it in self._taken(call)])
        )
        if not (shown.content or shown.reasoning or shown.calls or logprobs is not None):
            return before
        return before + super().delta(shown, logprobs)

    def finish(self, reason: str) -> bytes:
        """End the round without a chunk, since `last` or another round follows."""
        self.round_reason = reason
        made = list(self._calls.values())
        self.round_calls = [RoundCall(it.call_id, it.arguments, it.tool) for it in made]
        self._waiting = {it.call_id: it for it in made if it.tool is not None}
        text_from, reasoning_from = self._round_from
        text: str = orjson.loads(b'"%b"' % bytes(self._content[text_from:]))
        calls = [
            ToolCall.model_construct(
                id=it.call_id,
                type="function",
                function=FunctionCall.model_construct(name=it.name, arguments=it.arguments),
            )
            for it in made
        ]
        said = Message.model_construct(
            role="assistant",
            content=text.removeprefix(_BETWEEN_ROUNDS) if text_from else text,
            reasoning_content="".join(self._reasoning[reasoning_from:]) or None,
            tool_calls=calls or None,
        )
        self._messages.append(said)
        return b""

    def _taken(self, call: CallDelta) -> Sequence[CallDelta]:
        """Record a piece of a call, and return the piece unless the server runs the call."""
        made = self._calls.get(call.index)
        if made is None:
            shown = sum(it.tool is None for it in self._calls.values())
            made = _MadeCall(call, self._tools.get(call.name), shown)
            self._calls[call.index] = made
        made.arguments += call.arguments
        return (call._replace(index=made.shown_index),) if made.tool is None else ()

    # --- calls ------------------------------------------------------------------------------

    def begin_approved(self, request_id: str, tool: PlannedTool, arguments: str) -> str:
        """Raise AssertionError, because only the Responses API has approvals."""
        del request_id, tool, arguments
        raise AssertionError("a chat has no approvals")

    def answer(self, item_id: str, output: str, failure: str | None) -> bytes:
        """Return the chunk that reports the result of a call."""
        made = self._waiting.pop(item_id)
        tool = made.tool
        assert tool is not None, "only the server's tools are answered"
        text = marked(tool.name, output) if failure is None else failed(tool.name, failure)
        self._messages.append(
            Message.model_construct(role="tool", content=text, tool_call_id=item_id)
        )
        entry: dict[str, Any] = {"id": item_id, "type": "function"}
        if tool.target.is_mcp:
            entry |= {"type": "mcp", "server_label": tool.label}
        entry |= {"name": tool.name, "arguments": made.arguments}
        return self._executed_chunk(
            entry | {"output": output if failure is None else None, "error": failure}
        )

    def _executed_chunk(self, entry: dict[str, Any]) -> bytes:
        told = {"index": len(self._executed), **entry}
        self._executed.append(told)
        return self._chunk(orjson.dumps({"executed_tools": [told]}))

    # --- the end ----------------------------------------------------------------------------

    def end_as(self, reason: str) -> None:
        """Set the reason of the end, which is a finish reason or an exhausted budget's name."""
        self._reason = reason

    def last(self, usage: Mapping[str, Any] | None) -> bytes:
        """Return the end of the stream, with a usage chunk unless `usage` is None."""
        details = self._details
        more = b"" if details is None else b'"incomplete_details":%b,' % orjson.dumps(details)
        reason = b'"%b"' % self._finish_reason.encode()
        last = annotated(self._chunk(b"{}", more, reason), self.found)
        return last + (b"" if usage is None else self.completion.usage_chunk(dict(usage))) + DONE

    def choice(self, *, has_to_call: bool, has_logprobs: bool) -> dict[str, object]:
        """Return the whole answer as the completion's choice.

        Args:
            has_to_call: Whether the request forces a tool call.
            has_logprobs: Whether the request includes log probabilities.
        """
        calls = [it.told() for it in self._calls.values() if it.tool is None]
        is_null = not self._content and (calls or has_to_call)
        content = b"null" if is_null else b'"%b"' % bytes(self._content)
        message: dict[str, object] = {"role": "assistant", "content": orjson.Fragment(content)}
        message["refusal"] = None
        if self._compaction is not None:
            message["compaction"] = self._compaction
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._executed:
            message["executed_tools"] = self._executed
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": self._logprobs, "refusal": None} if has_logprobs else None
        choice: dict[str, object] = {"index": 0, "message": message, "logprobs": logprobs}
        choice["finish_reason"] = self._finish_reason
        if (details := self._details) is not None:
            choice["incomplete_details"] = details
        return choice if self.found is None else choice | {"content_filter_results": self.found}

    @property
    def _finish_reason(self) -> str:
        """The finish reason in OpenAI's terms, in which an exhausted budget is `length`."""
        return "length" if self._reason in _BUDGETS else self._reason

    @property
    def _details(self) -> dict[str, str] | None:
        return {"reason": self._reason} if self._reason in _BUDGETS else None
