"""The MCP servers of a request, with the calls that are allowed or need approval. Pure."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.bodies.fields import FunctionName, Only, ShortText, Text
from gateway.bodies.parsing import Strict

_NAMES_MAX = 128
_HEADERS_MAX = 16
_ToolNames = Annotated[list[ShortText], Field(fail_fast=True, max_length=_NAMES_MAX)]
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
_HeaderText = Annotated[str, Field(pattern=r"^[\x20-\x7e]{0,8192}$")]


class McpToolFilter(Strict):
    """Some tools of a server, by their names."""

    tool_names: _ToolNames
    read_only: Annotated[Any, Only()] = None


class McpApprovalFilter(Strict):
    """Names of the tools whose calls always need approval, and of those whose calls never do."""

    always: McpToolFilter | None = None
    never: McpToolFilter | None = None


class McpServerTool(Strict):
    """An MCP server, by the label under which the tenant registered it, or by its address."""

    type: Literal["mcp"]
    server_label: FunctionName
    server_url: Annotated[str, Field(max_length=2048)] | None = None
    server_description: Text | None = None
    allowed_tools: _ToolNames | McpToolFilter | None = None
    require_approval: Literal["always", "never"] | McpApprovalFilter | None = None
    headers: Annotated[dict[_HeaderName, _HeaderText], Field(max_length=_HEADERS_MAX)] | None = None
    authorization: _HeaderText | None = None
    connector_id: Annotated[Any, Only(instead="name a server of the tenant")] = None

    def allows(self, name: str) -> bool:
        """Return whether a tool of the server may be called."""
        allowed = self.allowed_tools
        names = allowed.tool_names if isinstance(allowed, McpToolFilter) else allowed
        return names is None or name in names

    def needs_approval(self, name: str, *, default: bool) -> bool:
        """Return whether a tool's calls need approval, or `default` if the request sets nothing."""
        wanted = self.require_approval
        if not isinstance(wanted, McpApprovalFilter):
            return default if wanted is None else wanted == "always"
        if wanted.never is not None and name in wanted.never.tool_names:
            return False
        return wanted.always is None or name in wanted.always.tool_names or default

    def public_fields(self) -> dict[str, Any]:
        """Return the fields that answers repeat, which exclude all secrets."""
        allowed = self.allowed_tools
        wanted = self.require_approval
        return {
            "type": "mcp",
            "server_label": self.server_label,
            "server_url": self.server_url,
            "server_description": self.server_description,
            "allowed_tools": allowed.model_dump(exclude_none=True)
            if isinstance(allowed, McpToolFilter)
            else allowed,
            "require_approval": wanted.model_dump(exclude_none=True)
            if isinstance(wanted, McpApprovalFilter)
            else wanted,
            "headers": None,
        }
