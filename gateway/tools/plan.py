"""The server tools of one request, with their form for the model and the targets of calls. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.bodies.messages import FunctionTool, Tool
from gateway.bodies.tool_results import NAME_CHARACTERS_MAX, function_name
from gateway.tools.loop import CallMode, LoopCall
from gateway.tools.mcp_protocol import McpTool

HTTP_LABEL = "http"  # server label of registered HTTP tools in output items


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The address of a tool, and the headers to send.

    Attributes:
        key: Key of the tool in circuit breakers and caches.
        is_mcp: Whether the tool belongs to an MCP server.
        url: URL of the call.
        method: HTTP method, unused for MCP.
        tool_id: Id in the registry, empty if the address is from the request.
        sealed: Encrypted headers from the registry.
        headers: Plain headers from the request.
    """

    key: tuple[str, ...]
    is_mcp: bool
    url: str
    method: str = "POST"
    tool_id: str = ""
    sealed: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class PlannedTool:
    """A server tool that the model may call.

    Attributes:
        shown_name: Name of the function that the model calls.
        label: Label of the tool's server in output items.
        name: Name of the tool at its server.
        description: Description for the model.
        parameters: JSON schema of the arguments.
        target: Address of the tool.
        timeout_s: Seconds for one attempt.
        result_bytes_max: Maximum bytes of output for the model.
        is_idempotent: Whether a failed call may be repeated.
        needs_approval: Whether a person has to approve each call.
        price_micros: Price of one call, in millionths of the ledger's currency.
    """

    shown_name: str
    label: str
    name: str
    description: str
    parameters: Mapping[str, Any]
    target: CallTarget
    timeout_s: float
    result_bytes_max: int
    is_idempotent: bool = False
    needs_approval: bool = True
    price_micros: int = 0

    def shown(self) -> Tool:
        """Return the tool as a function definition for the model."""
        function = FunctionTool.model_construct(
            name=self.shown_name,
            description=self.description or None,
            parameters=dict(self.parameters) or None,
        )
        return Tool.model_construct(type="function", function=function)

    def call(self, call_id: str, arguments: str, *, is_approved: bool = False) -> LoopCall:
        """Return a call of the tool for the loop, with its mode."""
        mode, refusal = CallMode.RUN, ""
        if self.needs_approval and not is_approved:
            mode = CallMode.APPROVE
        elif arguments_of(arguments) is None:
            mode, refusal = CallMode.REFUSE, "the arguments are not a JSON object."
        return LoopCall(
            call_id,
            mode,
            refusal,
            timeout_s=self.timeout_s,
            is_idempotent=self.is_idempotent,
            price_micros=self.price_micros,
        )


@dataclass(frozen=True, slots=True)
class ListedServer:
    """An MCP server whose tools were listed, or with an `error` if the listing failed."""

    label: str
    tools: Sequence[PlannedTool] = ()
    error: str = ""

    def tool_items(self) -> list[dict[str, Any]]:
        """Return the tools in the form of a list-tools item."""
        return [
            {"name": it.name, "description": it.description, "input_schema": it.parameters}
            | {"annotations": None}
            for it in self.tools
        ]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The server tools of one request.

    Attributes:
        tools: Tools by the function names that the model uses.
        servers: MCP servers whose tools were listed for the request.
    """

    tools: Mapping[str, PlannedTool]
    servers: Sequence[ListedServer] = ()

    def named(self, label: str, name: str) -> PlannedTool | None:
        """Return a tool by server label and name, or None if it may not be called."""
        for it in self.tools.values():
            if it.label == label and it.name == name:
                return it
        return None


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, or None if they are not a JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def shown_names(
    tools: Iterable[tuple[str, McpTool]], taken: Iterable[str]
) -> dict[tuple[str, str], str]:
    """Return unique function names of allowed characters, by server label and tool name."""
    names = set(taken)
    shown: dict[tuple[str, str], str] = {}
    for label, tool in tools:
        plain = function_name(tool.name)
        candidates = [plain, f"{label}_{plain}"[:NAME_CHARACTERS_MAX]]
        candidates += [f"{plain[: NAME_CHARACTERS_MAX - 4]}_{number}" for number in range(2, 999)]
        name = next(it for it in candidates if it not in names)
        names.add(name)
        shown[label, tool.name] = name
    return shown
