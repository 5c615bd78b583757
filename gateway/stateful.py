"""The APIs that store tenants' objects: responses, conversations, files, batches and chats."""

import asyncio
from collections.abc import Callable, Iterable

from gateway.auto.board import AutoBoard
from gateway.auto.prompt_keys import PromptHasher
from gateway.auto.shared_conversations import SharedConversations
from gateway.bases.assets import AssetCache
from gateway.batches.client import BatchClient
from gateway.batches.routes import Batches
from gateway.batches.worker import BatchWorker
from gateway.chat.compactor import ChatCompactor
from gateway.chat.endpoint import ChatCompletions
from gateway.chat.tool_planning import ChatToolPlanning
from gateway.content.seals import ContentSeals
from gateway.conversations.routes import Conversations
from gateway.conversations.store import ConversationStore
from gateway.directory import Directory
from gateway.dispatch.cell_choice import CellView
from gateway.endpoints.completer import Completer
from gateway.files.routes import TenantFiles
from gateway.files.store import FileStore
from gateway.limits.limiter import Limiter
from gateway.records.client import RecordClient
from gateway.records.sealed import SealedRecords
from gateway.responses.background import BackgroundResponses
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.compactor import PATH as COMPACT_PATH
from gateway.responses.compactor import Compaction, Compactor
from gateway.responses.context import ContextReader
from gateway.responses.counted_contexts import CountedContexts
from gateway.responses.endpoint import Responses
from gateway.responses.store import ResponseStore
from gateway.responses.stored import StoredResponses
from gateway.responses.tool_planning import ToolPlanning
from gateway.server.answer_counts import AnswerCounts
from gateway.server.routes import Routes
from gateway.server_tools import ServerTools
from gateway.settings import GatewaySettings
from gateway.tools.approval_leases import ApprovalLeases
from gateway.websocket.endpoint import ResponseSockets
from sluice.lifecycle import run_every
from sluice.shared_secret import ours as shared_secret
from sluice.watch import ControlState

_IDLE_LOOK_S = 60.0


class StatefulApis:
    """The stateful APIs of one worker. `run` must run in a TaskGroup.

    Attributes:
        responses: Store of responses.
        tools: Parts that run server tools.
        records: Store of all other objects.
        batches: Batches whose lines are answered here.
        background: Task that generates background responses, set by `add_to`.
        lines: Worker that answers lines of batches, set by `add_to`.
        completions: Stored chat completions, set by `add_to`.
        sockets: WebSockets of the Responses API, set by `add_to`.
    """

    background: BackgroundResponses
    lines: BatchWorker
    completions: ChatCompletions
    sockets: ResponseSockets

    def __init__(
        self,
        settings: GatewaySettings,
        counts: AnswerCounts,
        emit: Callable[[bytes], None],
        state: ControlState,
    ) -> None:
        """Create the parts without opening connections.

        Args:
            settings: Settings of the worker.
            counts: Counters of ended requests.
            emit: Queues one event for the broker, and never blocks.
            state: The control plane's snapshot, which has the keys that encrypt stored content.
        """
        self._counts = counts
        self._secret = secret = shared_secret()
        self._seals = seals = ContentSeals(state, secret)
        self.responses = ResponseStore(
            settings.valkey_url.get_secret_value(),
            settings.control_address,
            idle_s=settings.response_idle_s,
            secret=secret,
            seals=seals,
        )
        self.records = RecordClient(settings.control_address, secret)
        self.batches = BatchClient(settings.control_address, secret)
        self._gateway_id, self._grace_s = settings.instance_id, settings.response_grace_s
        self.tools = ServerTools(settings, secret, emit)

    def auto_board(
        self, directory: Directory, views: Callable[[str], Iterable[CellView]]
    ) -> AutoBoard:
        """Return the board that chooses a model for requests to `auto`.

        Through Valkey, the board also uses the prefixes that other workers have recorded.
        """
        hasher = PromptHasher(self._secret.mac("auto prefixes", b""))
        return AutoBoard(directory, views, hasher, SharedConversations(self.responses.commands))

    def add_to(
        self,
        routes: Routes,
        directory: Directory,
        completer: Completer,
        assets: AssetCache,
        limiter: Limiter,
    ) -> None:
        """Add the paths of all stateful APIs. The arguments are described at `Responses`."""
        store, self._assets = self.responses, assets
        leases = ApprovalLeases(store.commands, self._seals)
        answering = self.tools.answering(completer, leases)
        self.background = BackgroundResponses(answering, store, grace_s=self._grace_s)
        kept = SealedRecords(self.records, self._seals)
        conversations = ConversationStore(kept)
        seals = CompactionSeals(self._secret, self._seals)
        self._contexts = ContextReader(store, conversations, seals)
        contexts = CountedContexts(self._contexts, directory, limiter)
        compactor = Compactor(completer, assets, limiter, seals)
        responses = Responses(
            directory=directory,
            completer=completer,
            answering=answering,
            tools=ToolPlanning(directory, self.tools.catalog),
            assets=assets,
            limiter=limiter,
            store=store,
            background=self.background,
            conversations=conversations,
            contexts=contexts,
            compactor=compactor,
        )
        stored = StoredResponses(directory=directory, store=store)
        self.sockets = ResponseSockets(directory, responses, self._counts)
        routes.add("POST", "/v1/responses", responses.create)
        routes.add("GET", "/v1/responses", self.sockets.handle)
        routes.add("POST", "/v1/responses/input_tokens", responses.count_input)
        compaction = Compaction(directory, compactor, contexts, store)
        routes.add("POST", COMPACT_PATH, compaction.compact)
        routes.add("GET", "/v1/responses/*", stored.get)
        routes.add("POST", "/v1/responses/*", stored.post)
        routes.add("DELETE", "/v1/responses/*", stored.delete)
        Conversations(directory, conversations).add_to(routes)
        chat_tools = ChatToolPlanning(directory, self.tools.catalog)
        chats = ChatCompactor(compactor, seals)
        self.completions = ChatCompletions(directory, answering, chat_tools, chats, kept)
        self.completions.add_to(routes)
        files = FileStore(self.records)
        TenantFiles(directory, files).add_to(routes)
        self.lines = BatchWorker(self.batches, directory, routes, self._gateway_id)
        Batches(directory, self.batches, files, self.lines.look_soon).add_to(routes)

    async def run(self) -> None:
        """Run the background tasks of all stateful APIs until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.responses.run())
                tasks.create_task(self.background.run())
                tasks.create_task(self.lines.run())
                tasks.create_task(self.completions.keeper.run())
                tasks.create_task(
                    run_every(
                        _IDLE_LOOK_S,
                        self._forget_idle,
                        name="chains",
                        expected=(),
                        step_timeout_s=_IDLE_LOOK_S,
                    )
                )
        finally:
            await self.records.close()
            await self.batches.close()
            await self.tools.close()

    async def _forget_idle(self) -> None:
        self._contexts.forget_idle()
        for base in self._assets.loaded:
            base.forget_idle()

    async def stop(self) -> None:
        """Start no more background work, and drop running work after its generations have ended."""
        await self.lines.stop()
        await self.background.stop()

    async def flush(self, timeout_s: float) -> None:
        """Write waiting objects to PostgreSQL, for at most `timeout_s`."""
        await self.responses.flush(timeout_s)
        await self.completions.keeper.settled(timeout_s)
