"""Tools of a chat completion, which run either at the client or on the server. Pure."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.bodies.fields import Flag, FunctionName, Only
from gateway.bodies.messages import TOOLS_MAX, Tool
from gateway.bodies.parsing import Strict
from gateway.bodies.server_tools import McpServerTool

_OWN = "a registered tool has its own: leave it out"


class RegisteredFunction(Strict):
    """The name of a registered HTTP tool."""

    name: FunctionName
    description: Annotated[Any, Only(instead=_OWN)] = None
    parameters: Annotated[Any, Only(instead=_OWN)] = None
    strict: Annotated[Any, Only(False, instead=_OWN)] = None


class RegisteredTool(Strict):
    """An HTTP tool that the tenant has registered and the server runs."""

    type: Literal["function"]
    server: Flag
    function: RegisteredFunction


def _tool_form(value: Any) -> str:
    """Return the union's tag for a tool. Error paths omit it, so no field has this name."""
    if not isinstance(value, dict):
        return _FORMS.get(type(value), "a function")
    kind: object = value.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    is_registered = value.get("server") is True  # pyright: ignore[reportUnknownMemberType]
    return "a server" if kind == "mcp" else "a registered tool" if is_registered else "a function"


_FORMS: dict[type, str] = {McpServerTool: "a server", RegisteredTool: "a registered tool"}

ChatTool = Annotated[
    Annotated[Tool, Tag("a function")]
    | Annotated[RegisteredTool, Tag("a registered tool")]
    | Annotated[McpServerTool, Tag("a server")],
    Discriminator(_tool_form),
]
ChatTools = Annotated[list[ChatTool], Field(fail_fast=True, max_length=TOOLS_MAX)]
