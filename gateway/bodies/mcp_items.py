"""Items about tools that ran on the server, as clients send them back in later turns. Pure."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.bodies.fields import Flag, ShortText, Text

_TOOLS_MAX = 1024
DENIED = "the user did not agree to this call"


class _ServerItem(BaseModel):
    """An item that clients or SDKs send back as they received it. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ListedToolsItem(_ServerItem):
    """The tools that an MCP server listed in an earlier turn. The prompt omits this item."""

    type: Literal["mcp_list_tools"]
    id: ShortText | None = None
    server_label: ShortText
    tools: Annotated[list[dict[str, Any]], Field(max_length=_TOOLS_MAX)] = []
    error: Any = None


class ServerCallItem(_ServerItem):
    """A call of a tool that ran on the server, with its result."""

    type: Literal["mcp_call"]
    id: ShortText
    server_label: ShortText
    name: ShortText
    arguments: Text = ""
    output: Text | None = None
    error: Any = None
    approval_request_id: ShortText | None = None

    @property
    def failure(self) -> str | None:
        """The reason of a failure, or None if the call succeeded."""
        if self.error is None:
            return None
        return (
            str(self.error.get("message", "")) if isinstance(self.error, dict) else str(self.error)
        )


class ApprovalRequestItem(_ServerItem):
    """A call that waits for the caller's approval."""

    type: Literal["mcp_approval_request"]
    id: ShortText
    server_label: ShortText
    name: ShortText
    arguments: Text = ""


class ApprovalResponseItem(_ServerItem):
    """The caller's answer to an approval request."""

    type: Literal["mcp_approval_response"]
    id: ShortText | None = None
    approval_request_id: ShortText
    approve: Flag
    reason: Text | None = None


ServerItem = ListedToolsItem | ServerCallItem | ApprovalRequestItem | ApprovalResponseItem
