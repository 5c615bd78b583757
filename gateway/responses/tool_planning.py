"""Selects the server tools of a response, and the tool calls that a person has approved."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter

from gateway.bodies.mcp_items import ListedToolsItem
from gateway.bodies.messages import Message
from gateway.bodies.mistakes import bad_value
from gateway.bodies.response_items import CompactionItem, InputItem, InputItems, open_approvals
from gateway.bodies.responses import ResponseRequest
from gateway.directory import Directory, Principal
from gateway.responses.context import ResponseContext
from gateway.responses.task import ResponseTask, messages_for
from gateway.responses.tool_task import ToolResponseTask, ToolRounds
from gateway.tools.catalog import ToolCatalog, WantedTools, names_of_model
from gateway.tools.plan import ToolPlan
from gateway.tools.rounds import ApprovedCall

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


class ToolPlanning:
    """Plans the server tools of responses, for one worker."""

    def __init__(self, directory: Directory, catalog: ToolCatalog) -> None:
        """`catalog` selects the tools that a request names."""
        self._directory, self._catalog = directory, catalog

    async def rounds(
        self, principal: Principal, wanted: ResponseRequest, context: ResponseContext
    ) -> ToolRounds | None:
        """Return the rounds of a response with server tools, or None without server tools.

        Raises:
            BadRequestError: The request names a tool that this key may not use, or approves a call
                of a tool that the request omits.
        """
        functions = [it.name for it in wanted.functions]
        tools = WantedTools(wanted.server_functions, wanted.servers, functions)
        approvals = open_approvals(context.before, context.items)
        if tools.is_empty and not approvals:
            return None
        names = names_of_model(self._directory, principal, wanted.model)
        plan = await self._catalog.plan(principal, names, tools)
        return ToolRounds(
            _untold(plan, context),
            partial(_turns, wanted.instructions, context),
            approved=[
                _approved(plan, asked.id, asked.server_label, asked.name, asked.arguments)
                for asked, _ in approvals
            ],
        )


def tool_task(task: ResponseTask, wanted: ResponseRequest, rounds: ToolRounds) -> ToolResponseTask:
    """Return the task with server tools, or raise BadRequestError if its tools conflict."""
    fields: dict[str, Any] = {name: getattr(task, name) for name in type(task).model_fields}
    shown = [it.shown() for it in rounds.plan.tools.values()]
    fields["tools"] = [*(task.tools or ()), *shown] or None
    fields["max_tool_calls"] = wanted.max_tool_calls
    made = ToolResponseTask.model_construct(**fields, rounds=rounds)
    made.check_tools()
    return made


def over_summary(
    rounds: ToolRounds, instructions: str | None, context: ResponseContext
) -> ToolRounds:
    """Return the same rounds over a context whose earlier turns were summarized."""
    return ToolRounds(rounds.plan, partial(_turns, instructions, context), approved=rounds.approved)


def _turns(
    instructions: str | None, context: ResponseContext, output: Sequence[bytes]
) -> list[Message]:
    """Return the chat messages of a response, with the output items that it has so far.

    Compaction items of the output are omitted, because the context already has the summary.
    """
    more = _ITEMS.validate_python([orjson.loads(it) for it in output])
    told = [it for it in more if not isinstance(it, CompactionItem)]
    return messages_for(instructions, context, told)


def _untold(plan: ToolPlan, context: ResponseContext) -> ToolPlan:
    """Return a plan without the servers whose tools an earlier turn has listed already."""
    told = {
        it.server_label
        for it in (*context.before, *context.items)
        if isinstance(it, ListedToolsItem) and it.error is None
    }
    return replace(plan, servers=[it for it in plan.servers if it.label not in told])


def _approved(
    plan: ToolPlan, request_id: str, label: str, name: str, arguments: str
) -> ApprovedCall:
    tool = plan.named(label, name)
    if tool is None:
        text = f"the approved call needs the tool '{name}' of '{label}': send its server"
        raise bad_value("tools", text)
    return ApprovedCall(request_id, tool, arguments)
