"""Chooses models for requests to `auto`, and stand-ins for models that cannot answer now."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gateway.auto.decision import AUTO, AutoDecision
from gateway.auto.memory import ConversationMemory
from gateway.auto.prompt_keys import PromptHasher
from gateway.auto.shared_conversations import SharedConversations
from gateway.auto.speeds import LearnedSpeeds
from gateway.directory import Directory, Principal
from gateway.dispatch.cell_choice import CellView
from gateway.dispatch.tally import Tally
from gateway.pool_status import status_of_cells
from gateway.resolved import ResolvedModel
from sluice.auto.choice import AutoCandidate, AutoRules, AutoTurn, PoolOutlook, choose
from sluice.auto.features import features_of
from sluice.auto.quality import QualityCell, QualityPrior, QualityTable, table_of
from sluice.errors import PlatformError
from sluice.wire.control.v1 import control_pb2 as wire

_POLICIES_MAX = 4096
# Number of texts in a conversation's first prompt: a system prompt and a question. A prompt with
# more texts continues a conversation.
_TEXTS_OF_A_BEGINNING = 2
_LOT_DIGITS = 12


class AskedPrompt(NamedTuple):
    """The text of a request's prompt, before it is tokenized.

    Attributes:
        texts: Texts of the request's messages, or the prompts of a completion.
        tools: Number of tools that the model may call.
        ids: Number of prompt tokens that the client has sent as token ids.
    """

    texts: list[str]
    tools: int = 0
    ids: int = 0


class AskedTask(Protocol):
    """The fields of a request on which the choice depends (`gateway.endpoints.task.TextTask`)."""

    model: str

    @property
    def session(self) -> str:
        """Key of requests that share a prefix, or empty if the request has none."""
        ...

    @property
    def output_tokens_max(self) -> int | None:
        """Maximum number of output tokens per answer, or None if the request sets no maximum."""
        ...

    def asked(self) -> AskedPrompt:
        """Return the text of the request's prompt, as sent in its body."""
        ...


class _ReadyPolicy(NamedTuple):
    """A tenant's policy from the control plane, with the tables computed from it."""

    told: wire.AutoPolicy
    table: QualityTable
    rules: AutoRules


class AutoBoard:
    """Chooses models for requests to `auto`, and stand-ins for all models."""

    def __init__(
        self,
        directory: Directory,
        views: Callable[[str], Iterable[CellView]],
        hasher: PromptHasher,
        shared: SharedConversations,
    ) -> None:
        """Start without measured speeds and recorded prefixes.

        Args:
            directory: Models, and the callers that may use them.
            views: Returns the gateway's current view of each cell of a pool.
            hasher: Computes the keys of prompts.
            shared: Prefixes that all gateways have recorded as cached.
        """
        self._directory = directory
        self._views = views
        self._memory, self._hasher, self._shared = ConversationMemory(), hasher, shared
        self._speeds = LearnedSpeeds()
        self._policies: dict[str, _ReadyPolicy] = {}
        self._is_used = False

    async def decide(self, principal: Principal, task: AskedTask, uid: str) -> AutoDecision | None:
        """Return the choice for a request to `auto`, or None if the request names another model.

        Raises:
            PlatformError: None of the candidate models can answer.
        """
        policy = principal.auto_policy
        if task.model != AUTO or policy is None:
            return None
        self._is_used = True
        known = self._policy(policy)
        asked = task.asked()
        features = features_of(
            asked.texts,
            tools=asked.tools,
            output_tokens_max=task.output_tokens_max or 0,
            tier_priority=principal.tier.priority,
            prompt_tokens=asked.ids,
        )
        keys = self._hasher.keys(principal.tenant.id, task.session, asked.texts)
        current, cached = self._memory.look(keys, time.monotonic())
        if not current and (task.session or len(asked.texts) > _TEXTS_OF_A_BEGINNING):
            current, cached = await self._shared.look(keys)
        candidates, pools, lengths = list[AutoCandidate](), dict[str, PoolOutlook](), list[float]()
        for told in policy.candidates:
            resolved = self._usable(principal, told.model)
            if resolved is None:
                continue
            candidates.append(_candidate(told, resolved))
            pools[told.model] = self._outlook(resolved)
            lengths.append(self._speeds.of(resolved.model.pool_id).output_tokens)
        turn = AutoTurn(
            features,
            output_tokens=max(lengths, default=0.0),
            current=current,
            cached=cached,
            draw=int(uid[-_LOT_DIGITS:], 16) / 16**_LOT_DIGITS,
        )
        choice = choose(candidates, turn, known.table, pools, known.rules)
        return AutoDecision(choice, keys, features.tokens)

    def other(self, principal: Principal, asked: str, decision: AutoDecision | None) -> str | None:
        """Return the stand-in for a model that cannot answer now, or None if there is none.

        For `auto`, the stand-in is the next best model of `decision`. For any other model, the
        stand-in is the tenant's configured fallback.
        """
        if decision is None:
            return self._directory.fallback(principal, asked)
        return next(iter(decision.others), None)

    def note(
        self,
        decision: AutoDecision | None,
        pool_id: str,
        tally: Tally,
        answers: int,
        ended_at_s: float,
    ) -> None:
        """Record a pool's speed and a model's cached prefix after an answered request."""
        if not self._is_used:
            return
        self._speeds.note(pool_id, tally, answers, ended_at_s)
        if decision is None:
            return
        self._memory.note(decision.keys, decision.model, decision.tokens, ended_at_s)
        self._shared.note(decision.keys, decision.model, decision.tokens)

    def _usable(self, principal: Principal, name: str) -> ResolvedModel | None:
        """Return the model of a name, or None if the caller may not use it or it makes no text."""
        try:
            resolved = self._directory.resolve_any(principal, name)
        except PlatformError:
            return None
        return resolved if resolved.generates_text else None

    def _outlook(self, resolved: ResolvedModel) -> PoolOutlook:
        views = [view for pool_id in resolved.pool_ids for view in self._views(pool_id)]
        status, speed = status_of_cells(views, 0), self._speeds.of(resolved.model.pool_id)
        return PoolOutlook(
            is_served=status.replicas_ready > 0,
            replicas=status.replicas_ready,
            queued=status.queued,
            wait_s=(status.wait_ms or 0) / 1000,
            prompt_token_s=speed.prompt_token_s,
            output_token_s=speed.output_token_s,
        )

    def _policy(self, policy: wire.AutoPolicy) -> _ReadyPolicy:
        """Return a policy with its tables, which are computed when the policy is first used."""
        known = self._policies.get(policy.id)
        if known is not None and known.told is policy:
            return known
        if len(self._policies) >= _POLICIES_MAX:
            self._policies.clear()
        priors = {it.model: QualityPrior(it.published, it.quality) for it in policy.candidates}
        cells = [
            QualityCell(it.cluster, it.model, it.release, it.good, it.bad) for it in policy.cells
        ]
        rules = AutoRules(
            price_max=policy.price_max,
            quality_min=policy.quality_min,
            second_price=policy.second_price,
            miss_price=policy.miss_price,
            explored_share=policy.explored_share,
            queue_priority_min=policy.queue_priority_min,
            pin=policy.pin,
        )
        made = _ReadyPolicy(policy, table_of(cells, priors, policy.scheme), rules)
        self._policies[policy.id] = made
        return made


def _candidate(told: wire.AutoModel, resolved: ResolvedModel) -> AutoCandidate:
    return AutoCandidate(
        name=told.model,
        release=resolved.model.release,
        prompt_price=told.prompt_price,
        cached_price=told.cached_price,
        output_price=told.output_price,
        context_tokens_max=resolved.context_tokens_max,
    )
