"""Compiles and caches the tenants' rules on texts, and applies them to requests and answers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import structlog
from prometheus_client import Counter as CounterMetric

from gateway.directory import Principal
from gateway.dispatch.generation import Generation, GenerationSpec
from gateway.endpoints.task import TextTask
from gateway.guard.answer import AnswerGuard
from gateway.guard.findings import Findings
from gateway.guard.judged_answer import JudgedAnswer
from gateway.guard.judges import Judges
from gateway.guard.plan import GuardPlan
from gateway.guard.requests import (
    RequestFindings,
    judges,
    judges_requests,
    look_at,
    texts_by_target,
)
from gateway.text.detokenizer import TokenTable
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.guard.rules import GuardTarget
from sluice.wire.control.v1 import control_pb2 as wire

log = structlog.get_logger(__name__)

# Maximum number of compiled sets in memory. The largest sets use about 50 MB, including their
# automaton's cache.
_PLANS_MAX = 64
_RETRY_S = 1.0
_Key = tuple[tuple[object, ...], ...]


class GuardBoard:
    """The rules of one worker.

    No request is answered without its rules. A request therefore waits until its rules are
    compiled, about 100 ms at most and once per version.
    """

    def __init__(self, matches: CounterMetric, judges: Judges) -> None:
        """`matches` counts matches of rules by the label `stage`. `judges` are the classifiers."""
        self._judges = judges
        self._plans: dict[_Key, asyncio.Future[GuardPlan]] = {}
        self._acting, self._shadow = matches.labels("acting"), matches.labels("shadow")

    async def plan(self, principal: Principal, names: Iterable[str]) -> GuardPlan | None:
        """Return the rules for a caller and the names of a model, or None without rules."""
        wanted = frozenset(names)
        sets = [
            it
            for it in principal.guard_sets
            if (not it.models or not wanted.isdisjoint(it.models))
            and (not it.keys or principal.key.id in it.keys)
        ]
        if not sets:
            return None
        key = tuple([_key(it) for it in sets])
        plan = await self._compiled(key, sets)
        return plan if plan.targets or plan.judged else None

    async def _compiled(self, key: _Key, sets: Sequence[wire.GuardSet]) -> GuardPlan:
        known = self._plans.get(key)
        if known is None:
            while len(self._plans) >= _PLANS_MAX:
                del self._plans[next(iter(self._plans))]
            loop = asyncio.get_running_loop()
            known = self._plans[key] = loop.run_in_executor(None, partial(GuardPlan, sets))
        # Other requests may wait for the same compilation, so a cancelled request must not stop it.
        return await asyncio.shield(known)

    async def check(
        self,
        task: TextTask,
        plan: GuardPlan,
        table: TokenTable,
        principal: Principal,
        request_id: str,
    ) -> RequestFindings:
        """Apply rules to a request's texts, and return their findings.

        Raises:
            PlatformError: A rule blocks the request.
            RejectedError: A classifier missed its deadline, and its rule's set refuses unjudged
                texts.
        """
        if not judges_requests(plan):
            return RequestFindings()
        findings = await look_at(task.texts(table), plan)
        if judges(plan) and not findings.blocked_by:
            await self._judge(findings, texts_by_target(task.texts(table), plan), plan)
        self._count_and_log(findings.found, principal.tenant.id, request_id)
        if findings.blocked_by:
            message = f"The request was blocked by the rule '{findings.blocked_by}' of its tenant."
            raise PlatformError(ErrorCode.CONTENT_FILTER, message)
        return findings

    async def _judge(
        self, findings: RequestFindings, texts: Mapping[GuardTarget, str], plan: GuardPlan
    ) -> None:
        """Add the judgement of classifiers on a request's texts to its findings."""
        for target, text in texts.items():
            verdict = await self._judges.verdict(plan.judged[target], text)
            findings.found += verdict.found
            findings.unjudged |= verdict.unjudged
            if verdict.is_refused:
                names = ", ".join(sorted(verdict.unjudged))
                message = f"The request could not be judged: the classifier '{names}' does not"
                message += (
                    f" answer, and the rule '{verdict.blocked_by}' lets nothing pass unjudged."
                )
                raise RejectedError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S)
            findings.blocked_by = verdict.blocked_by
            if findings.blocked_by:
                return

    def guarded(
        self,
        specs: Sequence[GenerationSpec],
        plan: GuardPlan,
        request: RequestFindings,
        *,
        is_told: bool,
    ) -> list[GenerationSpec]:
        """Return specs whose answers are guarded by rules.

        Args:
            specs: Requested answers.
            plan: Rules.
            request: Findings of the rules in the request.
            is_told: Whether the client has requested annotations.
        """
        make: Callable[[], AnswerGuard]
        make = partial(AnswerGuard, plan, request.found, request.unjudged, is_told=is_told)
        if plan.judged_of_answers:
            make = partial(
                JudgedAnswer,
                plan,
                request.found,
                request.unjudged,
                ask=self._judges.judge,
                is_told=is_told,
            )
        return [it._replace(new_guard=make) for it in specs]

    def close(self, generations: Iterable[Generation], tenant_id: str, request_id: str) -> Findings:
        """Count and report the findings in ended answers.

        Returns:
            Findings in the answers and in the request.
        """
        guards = [it.guard for it in generations if it.guard is not None]
        found = Findings()
        for it in guards:
            it.close()
            found += it.findings()
        self._count_and_log(found, tenant_id, request_id)
        return found + guards[0].request if guards else found

    def _count_and_log(self, found: Findings, tenant_id: str, request_id: str) -> None:
        """Count matches, and log the ids of matched rules, but never the text."""
        for it, count in sorted(found.items()):
            (self._acting if it.acts else self._shadow).inc(count)
            log.info(
                "guard_matched",
                rule=it.rule,
                matches=count,
                is_shadow=not it.acts,
                tenant_id=tenant_id,
                request_id=request_id,
            )


def _key(it: wire.GuardSet) -> tuple[object, ...]:
    """Return the cache key of a rule set: its id, its versions, and the settings of its mode."""
    how = it.is_withheld_free, it.fence, it.fence_tokens, it.is_closed_on_failure
    return it.id, it.version, it.active_version, *how
