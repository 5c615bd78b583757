"""Runs the attempts of tool calls, each with a deadline and behind a circuit breaker."""

import time

from gateway.bodies.tool_results import bounded
from gateway.tools import http_tool
from gateway.tools.breaker import ToolBreakers
from gateway.tools.catalog import ToolCatalog
from gateway.tools.failures import ToolCallError
from gateway.tools.mcp_client import McpClient
from gateway.tools.outgoing import Outgoing
from gateway.tools.plan import PlannedTool, arguments_of


class ToolRunner:
    """Calls tools for one worker."""

    def __init__(self, outgoing: Outgoing, mcp: McpClient, catalog: ToolCatalog) -> None:
        """`catalog` returns the addresses and secret headers of tools."""
        self._outgoing, self._mcp, self._catalog = outgoing, mcp, catalog
        self._breakers = ToolBreakers()

    async def attempt(self, tool: PlannedTool, arguments: str, timeout_s: float) -> str:
        """Run one attempt of a call, and return the tool's output, cut to its maximum size.

        Raises:
            ToolCallError: The attempt failed, or the tool's circuit breaker is open.
        """
        key = tool.target.key
        if wait_s := self._breakers.refused_for_s(key, time.monotonic()):
            text = f"it has failed several times in a row; calls resume in {wait_s:.0f} s"
            raise ToolCallError(text, is_fault=False)
        try:
            output = await self._output(tool, arguments, timeout_s)
        except ToolCallError as failure:
            self._breakers.note(key, time.monotonic(), has_failed=failure.is_fault)
            failure.message = bounded(failure.message, tool.result_bytes_max)
            raise
        self._breakers.note(key, time.monotonic(), has_failed=False)
        return bounded(output, tool.result_bytes_max)

    async def _output(self, tool: PlannedTool, arguments: str, timeout_s: float) -> str:
        target, found = tool.target, arguments_of(arguments)
        assert found is not None, "the loop refuses what is no object"
        if target.is_mcp:
            address = self._catalog.address(target)
            return await self._mcp.call(address, tool.name, found, timeout_s)
        secrets = self._catalog.secrets(target)
        request = http_tool.request_of(target.method, target.url, found, secrets)
        return http_tool.result_of(await self._outgoing.send(request, timeout_s))
