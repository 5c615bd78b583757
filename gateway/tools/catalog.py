"""Selects the server tools of a request from registered tools and the tools of MCP servers."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from gateway.auto.decision import AUTO
from gateway.bodies.mistakes import bad_value
from gateway.bodies.server_tools import McpServerTool
from gateway.directory import Directory, Principal
from gateway.tools.failures import ToolCallError
from gateway.tools.mcp_client import McpAddress, McpClient
from gateway.tools.mcp_protocol import McpTool
from gateway.tools.plan import (
    HTTP_LABEL,
    CallTarget,
    ListedServer,
    PlannedTool,
    ToolPlan,
    shown_names,
)
from sluice.errors import BadRequestError, ErrorCode
from sluice.sealing import Sealer, SealError
from sluice.server_tools import header_place
from sluice.wire.control.v1 import control_pb2 as wire

_HTTP, _MCP = "http", "mcp"
_INLINE_TIMEOUT_S, _INLINE_BYTES_MAX = 10.0, 32 << 10
_LIST_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WantedTools:
    """The server tools that a request names.

    Attributes:
        functions: Names of registered HTTP tools, by the request fields that contain them.
        servers: MCP servers, by the request fields that contain them.
        others: Names of functions that the client itself runs.
    """

    functions: Mapping[str, str]
    servers: Mapping[str, McpServerTool]
    others: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the request names no server tools."""
        return not (self.functions or self.servers)


def names_of_model(directory: Directory, principal: Principal, model: str) -> set[str]:
    """Return all names by which a tool's rule may name the model.

    Raises PlatformError if no model has the name.
    """
    return {model} if model == AUTO else {model, directory.model(principal, model).id}


class ToolCatalog:
    """Plans the server tools of requests, for one worker."""

    def __init__(self, mcp: McpClient, sealer: Sealer) -> None:
        """`sealer` decrypts the secret headers of registered tools."""
        self._mcp, self._sealer = mcp, sealer

    async def plan(
        self, principal: Principal, models: Iterable[str], wanted: WantedTools
    ) -> ToolPlan:
        """Return the server tools of a request.

        Args:
            principal: The caller.
            models: Names of the requested model.
            wanted: The tools that the request names.

        Raises:
            BadRequestError: The request names a tool that this key may not use with this model.
        """
        names = frozenset(models)
        tools = {
            it.shown_name: it
            for it in [
                _http_tool(_registered(principal, names, _HTTP, name, f"{param}.name"))
                for param, name in wanted.functions.items()
            ]
        }
        servers = [
            await self._listed(param, it, _registered_server(principal, names, param, it))
            for param, it in wanted.servers.items()
        ]
        found = [(it.label, tool) for it in servers for tool in it.found]
        shown = shown_names(found, [*wanted.others, *tools])
        listed = [it.planned(shown) for it in servers]
        for server in listed:
            tools |= {it.shown_name: it for it in server.tools}
        return ToolPlan(tools, listed)

    def secrets(self, target: CallTarget) -> Mapping[str, str]:
        """Return the headers of a call, or raise ToolCallError if they cannot be decrypted here."""
        opened = dict(target.headers)
        for name, sealed in target.sealed.items():
            try:
                place = header_place(target.tool_id, target.url, name)
                opened[name] = self._sealer.opened(sealed, place)
            except SealError:
                text = "its secret headers cannot be opened here; send them again"
                raise ToolCallError(text, is_fault=False) from None
        return opened

    def address(self, target: CallTarget) -> McpAddress:
        """Return the address of a server.

        Raises ToolCallError if the secret headers of the server cannot be decrypted here.
        """
        return McpAddress(target.key, target.url, self.secrets(target))

    async def _listed(
        self, param: str, wanted: McpServerTool, registered: wire.ServerTool | None
    ) -> "_AskedServer":
        """Return a server with its tools, or with the reason why they could not be listed."""
        del param
        asked = _AskedServer(wanted, registered)
        try:
            tools = await self._mcp.tools(self.address(asked.target), _LIST_TIMEOUT_S)
        except ToolCallError as failure:
            asked.error = failure.message
            return asked
        asked.found = [it for it in tools if asked.allows(it.name)]
        return asked


class _AskedServer:
    """An MCP server that a request names."""

    def __init__(self, wanted: McpServerTool, registered: wire.ServerTool | None) -> None:
        self._wanted, self._registered = wanted, registered
        self.label, self.error = wanted.server_label, ""
        self.found: Sequence[McpTool] = ()
        self.target = _inline_target(wanted) if registered is None else _target_of(registered)

    def allows(self, name: str) -> bool:
        registered = self._registered
        if registered is not None and registered.allowed_tools:
            return name in registered.allowed_tools and self._wanted.allows(name)
        return self._wanted.allows(name)

    def planned(self, shown: Mapping[tuple[str, str], str]) -> ListedServer:
        tools = [self._planned(it, shown[self.label, it.name]) for it in self.found]
        return ListedServer(self.label, tools, self.error)

    def _planned(self, tool: McpTool, shown_name: str) -> PlannedTool:
        known = self._registered
        has_to = known is None or known.approval != "never"
        asked = self._wanted.needs_approval(tool.name, default=has_to)
        return PlannedTool(
            shown_name,
            self.label,
            tool.name,
            tool.description,
            tool.parameters,
            self.target,
            timeout_s=_INLINE_TIMEOUT_S if known is None else known.timeout_ms / 1000,
            result_bytes_max=_INLINE_BYTES_MAX if known is None else known.result_bytes_max,
            is_idempotent=known is not None and known.is_idempotent,
            # A request may add approval to a registered server, but cannot remove it.
            needs_approval=asked or (known is not None and has_to),
            price_micros=0 if known is None else known.price_micros,
        )


def _registered(
    principal: Principal, models: frozenset[str], kind: str, name: str, param: str
) -> wire.ServerTool:
    for it in principal.server_tools:
        if it.kind != kind or it.name != name:
            continue
        if it.models and models.isdisjoint(it.models):
            break
        if it.keys and principal.key.id not in it.keys:
            break
        return it
    what = "HTTP tool" if kind == _HTTP else "MCP server"
    text = f"no {what} '{name}' is registered that this key may use with this model"
    raise bad_value(param, text)


def _registered_server(
    principal: Principal, models: frozenset[str], param: str, wanted: McpServerTool
) -> wire.ServerTool | None:
    """Return the registered server, or None if the request names a URL and may name one."""
    if wanted.server_url is None:
        if wanted.headers or wanted.authorization:
            text = "a registered server has its own headers: leave them out"
            raise bad_value(f"{param}.headers", text)
        return _registered(principal, models, _MCP, wanted.server_label, f"{param}.server_label")
    if not principal.tenant.allows_server_urls:
        text = (
            "this account may use registered servers only: leave 'server_url' out, or ask for"
            " the server to be registered"
        )
        raise BadRequestError(ErrorCode.UNSUPPORTED_PARAMETER, text, param=f"{param}.server_url")
    return None


def _http_tool(found: wire.ServerTool) -> PlannedTool:
    return PlannedTool(
        found.name,
        HTTP_LABEL,
        found.name,
        found.description,
        orjson.loads(found.parameters or "{}"),
        _target_of(found),
        timeout_s=found.timeout_ms / 1000,
        result_bytes_max=found.result_bytes_max,
        is_idempotent=found.is_idempotent,
        needs_approval=found.approval != "never",
        price_micros=found.price_micros,
    )


def _target_of(found: wire.ServerTool) -> CallTarget:
    sealed = dict(found.secret_headers)
    digest = hashlib.sha256(orjson.dumps(sorted(sealed.items()))).hexdigest()
    return CallTarget(
        ("registered", found.owner_tenant_id, found.id, found.url, digest),
        found.kind == _MCP,
        found.url,
        found.method,
        found.id,
        sealed,
    )


def _inline_target(wanted: McpServerTool) -> CallTarget:
    headers = dict(wanted.headers or {})
    if wanted.authorization:
        headers["Authorization"] = f"Bearer {wanted.authorization}"
    digest = hashlib.sha256(orjson.dumps(sorted(headers.items()))).hexdigest()
    url = wanted.server_url or ""
    return CallTarget(("named", url, digest), is_mcp=True, url=url, headers=headers)
