"""Items that tell of tools that ran here, and their place in the turns of a chat. Pure."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.bodies.fields import Flag, ShortText, Text

_TOOLS_MAX = 1024
DENIED = "the user did not agree to this call"


class _ServerItem(BaseModel):
    """An item that clients send back as received, or SDKs completed it; ignores other fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ListedToolsItem(_ServerItem):
    """The tools of a server, as it listed them; no model is shown it again."""

    type: Literal["mcp_list_tools"]
    id: ShortText | None = None
    server_label: ShortText
    tools: Annotated[list[dict[str, Any]], Field(max_length=_TOOLS_MAX)] = []
    error: Any = None


class ServerCallItem(_ServerItem):
    """A call of a tool that ran here, with what came of it."""

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
        """Why it failed, in words; None: it did not."""
        if self.error is None:
            return None
        return (
            str(self.error.get("message", "")) if isinstance(self.error, dict) else str(self.error)
        )


class ApprovalRequestItem(_ServerItem):
    """A call that waits for a yes."""

    type: Literal["mcp_approval_request"]
    id: ShortText
    server_label: ShortText
    name: ShortText
    arguments: Text = ""


class ApprovalResponseItem(_ServerItem):
    """The answer to such a request."""

    type: Literal["mcp_approval_response"]
    id: ShortText | None = None
    approval_request_id: ShortText
    approve: Flag
    reason: Text | None = None


ServerItem = ListedToolsItem | ServerCallItem | ApprovalRequestItem | ApprovalResponseItem
