"""Finds the tools that run on the server for a chat completion, and checks their use."""

from typing import Any

from gateway.bodies.mistakes import unsupported
from gateway.chat.tool_task import ChatRounds, ToolChatTask
from gateway.directory import Directory, Principal
from gateway.endpoints.chat_task import ChatTask
from gateway.tools.catalog import ToolCatalog, WantedTools, names_of_model
from gateway.tools.plan import ToolPlan


class ChatToolPlanning:
    """Creates the tasks of chat completions with server tools, for one worker."""

    def __init__(self, directory: Directory, catalog: ToolCatalog) -> None:
        """Store the directory and the catalog of tools."""
        self._directory, self._catalog = directory, catalog

    async def task(self, principal: Principal, wanted: ChatTask) -> ToolChatTask:
        """Return the task of a completion with server tools.

        Raises:
            BadRequestError: The request names a tool that this key may not use, or a tool whose
                calls need approval, or tools that cannot be combined.
        """
        mine = wanted.functions_told
        functions = wanted.server_functions
        tools = WantedTools(functions, wanted.servers, [it.function.name for it in mine])
        names = names_of_model(self._directory, principal, wanted.model)
        plan = await self._catalog.plan(principal, names, tools)
        _require_no_approval(plan, wanted)
        fields: dict[str, Any] = {name: getattr(wanted, name) for name in ChatTask.model_fields}
        fields["tools"] = [*mine, *(it.shown() for it in plan.tools.values())]
        made = ToolChatTask.model_construct(**fields, rounds=ChatRounds(plan))
        made.check_tools()
        return made


def _require_no_approval(plan: ToolPlan, wanted: ChatTask) -> None:
    """Raise BadRequestError, with a remedy in its text, if any tool's calls need approval."""
    for it in plan.tools.values():
        if not it.needs_approval:
            continue
        text = f"calls of '{it.name}' need approval, which a chat cannot ask for; "
        if not it.target.is_mcp:
            at = next(at for at, name in wanted.server_functions.items() if name == it.name)
            text += "use /v1/responses, or have the tool registered with the approval 'never'"
            raise unsupported(f"{at}.name", text)
        at = next(at for at, server in wanted.servers.items() if server.server_label == it.label)
        text += (
            'send "never", which a server\'s registration may exclude, leave the tool out of'
            " 'allowed_tools', or use /v1/responses"
        )
        raise unsupported(f"{at}.require_approval", text)
