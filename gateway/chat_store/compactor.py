"""Chats that become shorter: a model sums up earlier turns, and the answer has what it said."""

from aiohttp import web

from gateway.bodies.chat_compaction import expanded_chat, split_chat, summed_up
from gateway.bodies.messages import CompactedHistory
from gateway.directory import Principal
from gateway.endpoints.chat import ChatTask
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.compactor import Compactor
from gateway.server.identity import identity_of


class ChatCompactor:
    """Shortens chats, for one worker."""

    def __init__(self, compactor: Compactor, seals: CompactionSeals) -> None:
        """Compose."""
        self._compactor, self._seals = compactor, seals

    def expanded(self, tenant_id: str, task: ChatTask) -> ChatTask:
        """Return a task with the messages that a model is shown.

        BadRequestError: a compaction among them is not this tenant's, or its secret is over.
        """
        if not any(it.compaction for it in task.messages):
            return task
        shown = expanded_chat(
            task.messages,
            lambda index, item: self._seals.opened_chat(
                tenant_id, item, f"messages[{index}].compaction.encrypted_content"
            ),
        )
        return task.model_copy(update={"messages": shown})

    async def shortened(
        self, request: web.Request, principal: Principal, task: ChatTask
    ) -> tuple[ChatTask, CompactedHistory | None]:
        """Return a task over a summary where that is due, with what stands for earlier turns.

        PlatformError: no summary was made.
        """
        policy = task.compaction_policy
        if policy is None or not await self._compactor.is_due(request, principal, policy, task):
            return task, None
        split = split_chat(task.messages)
        if split is None:
            return task, None
        made = await self._compactor.summary_of(
            request,
            principal,
            model=policy.model or task.model,
            messages=split.said,
            session=task.session,
            service_tier=task.service_tier,
        )
        item_id = f"cmp_{identity_of(request).uid}"
        item = self._seals.sealed_chat(principal.tenant.id, item_id, made.text, split.kept)
        shown = summed_up(task.messages, made.text, split.kept)
        return task.model_copy(update={"messages": shown}), item
