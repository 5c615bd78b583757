"""Creates and connects the parts of one worker that run server tools."""

from collections.abc import Callable

from gateway.endpoints.completer import Completer
from gateway.settings import GatewaySettings
from gateway.tools.answering import ToolAnswering
from gateway.tools.approval_leases import ApprovalLeases
from gateway.tools.catalog import ToolCatalog
from gateway.tools.loop import LoopBudget
from gateway.tools.mcp_client import McpClient
from gateway.tools.outgoing import Outgoing
from gateway.tools.runner import ToolRunner
from sluice.sealing import Sealer
from sluice.server_tools import SEALED_FOR
from sluice.shared_secret import SharedSecret


class ServerTools:
    """The server tools of one worker.

    Attributes:
        catalog: Looks up the server tools that a request names.
    """

    def __init__(
        self, settings: GatewaySettings, secret: SharedSecret, emit: Callable[[bytes], None]
    ) -> None:
        """Create the parts without connections. `emit` queues one event and never blocks."""
        self._emit, self._gateway_id = emit, settings.instance_id
        self._outgoing = Outgoing(settings.tool_hosts.lower().split(","))
        mcp = McpClient(self._outgoing)
        self.catalog = ToolCatalog(mcp, Sealer(secret, SEALED_FOR))
        self._runner = ToolRunner(self._outgoing, mcp, self.catalog)
        self._keep_alive_s = settings.keep_alive_s
        self._budget = LoopBudget(
            settings.tool_calls_max,
            settings.tool_tokens_max,
            settings.tool_loop_s,
            settings.tool_micros_max,
        )

    def answering(self, completer: Completer, leases: ApprovalLeases) -> ToolAnswering:
        """Return the part that answers requests and runs the server tools that the model calls."""
        return ToolAnswering(
            completer,
            self._runner,
            leases,
            self._budget,
            keep_alive_s=self._keep_alive_s,
            emit=self._emit,
            gateway_id=self._gateway_id,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._outgoing.close()
