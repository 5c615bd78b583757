"""Retains requests and answers of tenants that opted in, after redacting them.

A request's handler only checks its caller's setting. After the request has ended, its texts wait in
a bounded queue. A background task redacts them in small steps with pauses, so that no other request
waits for more than one step. Texts beyond the queue's bounds, and texts that fail, are dropped and
counted. No character of them is logged.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import structlog

from gateway.dispatch.generation import GenerationSpec
from gateway.endpoints.exchange import HttpExchange
from gateway.endpoints.task import TextTask
from gateway.metrics import GatewayMetrics
from gateway.texts.documents import Document, TextTokens, document
from gateway.texts.redaction import rules_of
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.text_pb2 import TextEvent

log = structlog.get_logger(__name__)

T = TypeVar("T")

SCHEMA_VERSION = 1
SHARE_MAX = 10_000
QUEUE_MAX = 1_000
# Maximum number of tokens in the queue, in prompts and answers together. They use about 20 MB.
QUEUE_TOKENS_MAX = 2_000_000
_STEP_S = 0.0005  # Seconds of work before the event loop can run other tasks.
# Pause after a step, as a multiple of the step's duration. The task then uses a fifth of the time.
_REST = 4.0
_DAY_MS = 86_400_000


def is_kept(policy: control.TextPolicy, request_id: str) -> bool:
    """Return whether a request is in the retained share. Equal ids have equal results."""
    if policy.share >= SHARE_MAX:
        return True
    digest = blake2b(f"{policy.id}\n{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SHARE_MAX < policy.share


class KeptRequest(NamedTuple):
    """The parts of a running request that are retained after the request drops its body."""

    policy: control.TextPolicy
    task: TextTask


class _EndedText(NamedTuple):
    kept: KeptRequest
    event: TextEvent
    specs: Sequence[GenerationSpec]
    answers: Sequence[Sequence[int]]
    tokens: int


class Texts:
    """The queue of one worker. `run` has to run in a TaskGroup."""

    def __init__(self, ship: Callable[[TextEvent], None], metrics: GatewayMetrics) -> None:
        """`ship` receives finished events and never blocks."""
        self._ship = ship
        self._waiting: deque[_EndedText] = deque()
        self._tokens = 0
        self._has_some = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._made = metrics.texts.labels("kept")
        self._full = metrics.texts.labels("full")
        self._failed = metrics.texts.labels("failed")
        self._stopped = metrics.texts.labels("stopped")

    @staticmethod
    def begin(policy: control.TextPolicy, task: TextTask, request_id: str) -> KeptRequest | None:
        """Return the request to retain, or None if it is not in the retained share."""
        return KeptRequest(policy, task) if is_kept(policy, request_id) else None

    def offer(self, kept: KeptRequest, exchange: HttpExchange) -> None:
        """Queue the texts of a request that has ended, if there is room."""
        specs, answers = exchange.specs, [it.emitted for it in exchange.generations]
        prompt_tokens = sum([len(it.prompt) for it in specs[:: exchange.answers_per_prompt]])
        tokens = prompt_tokens + sum(map(len, answers))
        if len(self._waiting) >= QUEUE_MAX or self._tokens + tokens > QUEUE_TOKENS_MAX:
            self._full.inc()
            return
        event = _event(kept.policy, exchange)
        self._waiting.append(_EndedText(kept, event, specs, answers, tokens))
        self._tokens += tokens
        self._has_some.set()
        self._is_idle.clear()

    async def run(self) -> None:
        """Redact and ship queued texts until cancelled."""
        try:
            while True:
                await self._has_some.wait()
                await self._make(self._waiting[0])
                self._tokens -= self._waiting.popleft().tokens
                if not self._waiting:
                    self._has_some.clear()
                    self._is_idle.set()
        finally:
            self._stopped.inc(len(self._waiting))

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued texts are shipped, for at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()

    async def _make(self, ended: _EndedText) -> None:
        try:
            rules = rules_of(ended.kept.policy.redacted, ended.kept.policy.words)
            table = ended.specs[0].new_pipe().table
            prompt = await _gently(document(ended.kept.task.texts(table), rules))
            answers = await _gently(document([("answers", _answers(ended))], rules))
            self._ship(_filled(ended.event, prompt, answers))
        except Exception as error:  # noqa: BLE001 - one text must not end the worker
            # The error itself is not logged, because it may quote the text.
            self._failed.inc()
            request_id = ended.event.request_id
            log.error("text_not_prepared", request_id=request_id, error=type(error).__name__)  # noqa: TRY400
        else:
            self._made.inc()


def _answers(ended: _EndedText) -> Iterator[object]:
    for spec, ids in zip(ended.specs, ended.answers, strict=False):  # a request may have no answers
        yield TextTokens(spec.new_pipe(), ids, is_answer=True)


async def _gently(steps: Generator[None, None, T]) -> T:
    """Run a generator with pauses, and return its result."""
    began_s = time.monotonic()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        now_s = time.monotonic()
        if now_s - began_s >= _STEP_S:
            await asyncio.sleep(_REST * (now_s - began_s))
            began_s = time.monotonic()


def _event(policy: control.TextPolicy, exchange: HttpExchange) -> TextEvent:
    """Return the event without its texts."""
    received_ms = exchange.received_at_unix_ms
    return TextEvent(
        schema_version=SCHEMA_VERSION,
        event_id=f"evt_{exchange.uid}",
        received_at_unix_ms=received_ms,
        request_id=exchange.request_id,
        tenant_id=exchange.principal.tenant.id,
        model=exchange.model.id,
        endpoint=exchange.endpoint,
        expires_at_unix_ms=received_ms + policy.retention_days * _DAY_MS,
        outcome=exchange.outcome,
    )


def _filled(event: TextEvent, prompt: Document, answers: Document) -> TextEvent:
    event.prompt, event.is_prompt_cut = prompt.json, prompt.is_cut
    event.answers, event.is_answer_cut = answers.json, answers.is_cut
    for redactions in (prompt.redactions, answers.redactions):
        for kind, count in redactions.items():
            event.redactions[kind] += count
    return event
