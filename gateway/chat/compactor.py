"""Shortens long chats. A model summarizes earlier messages, and the answer returns the summary."""

from aiohttp import web

from gateway.bodies.chat_compaction import expanded_chat, split_chat, summed_up
from gateway.bodies.messages import CompactedHistory
from gateway.directory import Principal
from gateway.endpoints.chat_task import ChatTask
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.compactor import Compactor
from gateway.server.identity import identity_of


class ChatCompactor:
    """Shortens the chats of one worker."""

    def __init__(self, compactor: Compactor, seals: CompactionSeals) -> None:
        """Store the parts that write and encrypt summaries."""
        self._compactor, self._seals = compactor, seals

    def expanded(self, tenant_id: str, task: ChatTask) -> ChatTask:
        """Return a task whose compaction items are replaced by the summaries that they contain.

        Raises BadRequestError if a compaction item belongs to another tenant, or if its key has
        expired.
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
        """Return a task whose earlier messages are summarized, if the client's condition is met.

        Returns:
            The task, and the compaction item for the client, or None if nothing was summarized.

        Raises:
            PlatformError: The model could not write the summary.
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
