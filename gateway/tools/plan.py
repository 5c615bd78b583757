"""The tools that run here for one request, as models know them and as they are called. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.bodies.messages import FunctionTool, Tool
from gateway.bodies.tool_results import NAME_CHARACTERS_MAX, function_name
from gateway.tools.loop import CallMode, LoopCall
from gateway.tools.mcp_protocol import McpTool

HTTP_LABEL = "http"  # of tools that are HTTP addresses, in items that tell of calls


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The place of a tool.

    Attributes:
        key: Names it, for its breaker and for what is remembered of it.
        is_mcp: Whether it belongs to a server of MCP.
        url: Where it is called.
        method: Of an HTTP address.
        tool_id: Of the registry; empty: the request named the address.
        sealed: Headers of the registry.
        headers: Headers of the request.
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
    """A tool that the model may call, and that runs here.

    Attributes:
        shown_name: Name of the function, as the model knows it.
        label: Of its server, in items.
        name: Its own name.
        description: For the model.
        parameters: JSON schema of the arguments.
        target: Where it is called.
        timeout_s: Of one attempt.
        result_bytes_max: That the model is shown.
        is_idempotent: Whether a failed call may be tried again.
        needs_approval: Whether a person has to agree to each call.
        price_micros: Of one call.
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
        """Return the function that the model is told of."""
        function = FunctionTool.model_construct(
            name=self.shown_name,
            description=self.description or None,
            parameters=dict(self.parameters) or None,
        )
        return Tool.model_construct(type="function", function=function)

    def call(self, call_id: str, arguments: str, *, is_approved: bool = False) -> LoopCall:
        """Return a call of it."""
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
    """A server whose tools were listed; `error` says why they could not be."""

    label: str
    tools: Sequence[PlannedTool] = ()
    error: str = ""

    def told(self) -> list[dict[str, Any]]:
        """Return the tools, as items tell of them."""
        return [
            {"name": it.name, "description": it.description, "input_schema": it.parameters}
            | {"annotations": None}
            for it in self.tools
        ]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of one request that run here.

    Attributes:
        tools: By the name that the model knows.
        servers: Servers that were asked for their tools.
    """

    tools: Mapping[str, PlannedTool]
    servers: Sequence[ListedServer] = ()

    def named(self, label: str, name: str) -> PlannedTool | None:
        """Return a tool by its own name and its server; None: it may not be called."""
        for it in self.tools.values():
            if it.label == label and it.name == name:
                return it
        return None


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None: they are no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def shown_names(
    tools: Iterable[tuple[str, McpTool]], taken: Iterable[str]
) -> dict[tuple[str, str], str]:
    """Return names for models by label and name: unique, and of letters that functions may have."""
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
