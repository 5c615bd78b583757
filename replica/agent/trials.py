"""Loads an adapter and generates a token with it, before a rollout sends requests to it.

This is the adapter's trial, on one ready replica of the pool. The result is part of every report
to the control plane for as long as the control plane wants the trial.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from replica.agent.golden import GoldenTarget
from replica.agent.model_kinds import LLM
from sluice.errors import ErrorCode, FailedError, PlatformError
from sluice.hashing import HASH_BYTES
from sluice.kserve import probe
from sluice.wire.agent.v1 import agent_pb2 as agent

log = structlog.get_logger(__name__)

TRIALS_MAX = 256  # largest number of trials per node
# Number of failures after which the adapter is at fault, if the engine can load other adapters
FAILURES_MAX = 3
# longest time per attempt, in seconds, during which the node may have to fetch the adapter
_DEADLINE_S = 60.0
_RETRY_S = 2.0
_LOOK_S = 0.25
_PROMPT = [1, 2, 3, 4]  # token ids that every vocabulary has
_MESSAGE_MAX = 500
_REFUSED = " refused: "  # text between an engine's address and the engine's error

Try = Callable[[GoldenTarget, str], Awaitable[None]]


@dataclass(slots=True)
class _Trial:
    """An adapter to try, with its failures so far. Without a result, the trial has not ended."""

    wish: agent.Trial
    failures: int = 0
    not_before_s: float = 0.0
    is_busy: bool = False
    result: agent.TrialResult | None = None


def is_fault(code: ErrorCode, failures: int) -> bool:
    """Return whether a failed attempt proves that the adapter is at fault. Pure."""
    if code is ErrorCode.ADAPTER_INVALID:
        return True
    return not code.policy.spares_adapter and failures >= FAILURES_MAX


class AdapterTrials:
    """Runs the trials of one node in `run`, which is a task of a TaskGroup."""

    def __init__(
        self,
        targets: Callable[[], Sequence[GoldenTarget]],
        on_change: Callable[[], None],
        attempt: Try | None = None,
    ) -> None:
        """Create a runner without trials.

        Args:
            targets: Function that returns the replicas that may receive a trial at present.
            on_change: Function that is called when a trial has a result.
            attempt: Function that loads an adapter in a replica and generates, or None for the
                engine's probe.
        """
        self._targets = targets
        self._on_change = on_change
        self._attempt = attempt or try_adapter
        self._trials: dict[str, _Trial] = {}  # by rollout id
        self._pools: dict[str, str] = {}  # replica id -> pool id

    def follow(self, desired: agent.SyncResponse) -> None:
        """Replace the trials by those of a desired state. Unchanged trials retain their results."""
        self._pools = {wish.replica_id: wish.pool_id for wish in desired.replicas}
        before = self._trials
        self._trials = {}
        for wish in desired.trials[:TRIALS_MAX]:
            known = before.get(wish.rollout_id)
            is_same = known is not None and known.wish == wish
            self._trials[wish.rollout_id] = known if is_same and known else _Trial(wish)

    def results(self) -> list[agent.TrialResult]:
        """Return the results of the trials that have ended."""
        return [it.result for it in self._trials.values() if it.result is not None]

    async def run(self) -> None:
        """Run trials until cancelled, at most one per replica at a time."""
        async with asyncio.TaskGroup() as group:
            busy: set[str] = set()
            while True:
                now_s = time.monotonic()
                free = [it for it in self._targets() if it.replica_id not in busy]
                for trial in list(self._trials.values()):
                    if trial.is_busy or trial.result is not None or now_s < trial.not_before_s:
                        continue
                    target = self._of_pool(free, trial.wish.pool_id)
                    if target is not None:
                        free.remove(target)
                        busy.add(target.replica_id)
                        trial.is_busy = True
                        group.create_task(self._put(trial, target, busy))
                await asyncio.sleep(_LOOK_S)

    def _of_pool(self, targets: Sequence[GoldenTarget], pool_id: str) -> GoldenTarget | None:
        found = (it for it in targets if self._pools.get(it.replica_id) == pool_id)
        return next(found, None)

    async def _put(self, trial: _Trial, target: GoldenTarget, busy: set[str]) -> None:
        """Make one attempt, and record its result."""
        wish = trial.wish
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._attempt(target, wish.adapter_digest)
        except PlatformError as error:
            self._failed(trial, target, error.code, error.message)
        except (OSError, TimeoutError) as error:
            self._failed(trial, target, ErrorCode.ENGINE_FAILED, str(error) or repr(error))
        else:
            trial.result = agent.TrialResult(rollout_id=wish.rollout_id)
            self._on_change()
        finally:
            trial.is_busy = False
            busy.discard(target.replica_id)

    def _failed(self, trial: _Trial, target: GoldenTarget, code: ErrorCode, message: str) -> None:
        wish = trial.wish
        told = (message.partition(_REFUSED)[2] or message)[:_MESSAGE_MAX]
        log.info("trial_failed", rollout=wish.rollout_id, replica=target.replica_id, reason=told)
        trial.failures += not code.policy.spares_adapter
        trial.not_before_s = time.monotonic() + _RETRY_S
        if is_fault(code, trial.failures):
            trial.result = agent.TrialResult(rollout_id=wish.rollout_id, code=code, message=told)
            self._on_change()


async def try_adapter(target: GoldenTarget, adapter_digest: str) -> None:
    """Load an adapter in a replica, and generate a token with it.

    Raises:
        FailedError: The engine cannot load or run the adapter.
    """
    root = secrets.token_bytes(HASH_BYTES)
    try:
        reply = await probe(
            *(target.address, LLM.model, _PROMPT, 1, _DEADLINE_S),
            adapter_digest=adapter_digest,
            cache_root=root,
        )
    except DecodeError as error:
        message = f"{target.address} answered with something that is no frame: {error}"
        raise FailedError(ErrorCode.ENGINE_FAILED, message) from error
    if not reply.tokens:
        raise FailedError(ErrorCode.ENGINE_FAILED, f"{target.address} generated nothing with it")
