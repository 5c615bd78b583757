"""Sends golden prompts to the node's ready replicas at intervals, beside their normal requests.

The control plane compares the answers of a pool's replicas, and the agent only reports them. A
golden request is greedy, short and urgent, and ends within a few steps. Its block hashes have a new
root. So it uses no cached blocks, which could hide that an engine computes wrongly now.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import structlog
from google.protobuf.message import DecodeError

from replica.agent.model_kinds import KINDS, LLM
from replica.agent.replica_state import ReplicaPhase
from replica.agent.runner import ReplicaRunner
from sluice.detector.replies import WrongAnswerError, check_engine
from sluice.errors import PlatformError
from sluice.hashing import HASH_BYTES
from sluice.kserve import probe
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.engine.v1 import engine_pb2 as engine

log = structlog.get_logger(__name__)

OUTPUT_TOKENS_MAX = 64  # largest number of output tokens that a golden prompt may request
PROMPTS_MAX = 512  # largest number of prompts per node
# Prefixes of the ids of the platform's own prompts, which have precedence over tenants' prompts.
PLATFORM = ("default/", "default-")
_REMEMBERED_MAX = 16_384  # largest number of stored times, one per pair (replica, prompt)
# Largest number of unsent results, beyond which the oldest are dropped
RESULTS_MAX = 256
DEADLINE_S = 20.0  # seconds per golden request, during which the engine may have to load an adapter
_LOOK_S = 0.25
_PAUSE_S = 1.0  # shortest pause in seconds between two golden requests to one replica
# longest time in seconds before a new replica's, or a new prompt's, first request
_FIRST_WITHIN_S = 5.0
# spread of the interval, as a share of the interval, so that a pool's replicas differ in time
_JITTER = 0.2
_ERROR_MAX = 500


@dataclass(frozen=True, slots=True)
class GoldenTarget:
    """A replica that may receive a golden prompt at present.

    Attributes:
        replica_id: Id of the replica.
        address: host:port of its gRPC.
        engine: Name of its driver.
        base_digest: Digest of the base that it serves.
    """

    replica_id: str
    address: str
    engine: str
    base_digest: str


Ask = Callable[[GoldenTarget, agent.GoldenPrompt], Awaitable[engine.ProbeReply]]


class GoldenObserver(Protocol):
    """Observes golden requests, for metrics."""

    def asked(self, *, is_answered: bool) -> None:
        """Record that a golden request has ended."""
        ...


class GoldenSchedule:
    """Chooses the next golden prompt of each replica. Pure, with times in monotonic seconds."""

    def __init__(self) -> None:
        self._prompts: dict[str, agent.GoldenPrompt] = {}
        # (replica, prompt) -> time of the last request, or for a new pair an assumed one
        self._asked_s: dict[tuple[str, str], float] = {}
        self._free_s: dict[str, float] = {}  # replica -> earliest time of its next request
        # suspected replica -> time from which the platform's prompts are due
        self._accused_s: dict[str, float] = {}
        self._replicas: frozenset[str] = frozenset()

    def want(self, prompts: Iterable[agent.GoldenPrompt]) -> None:
        """Replace the prompts. A prompt that remains retains the times of its last requests."""
        kept = list(prompts)[:PROMPTS_MAX]
        self._prompts = {prompt.id: prompt for prompt in kept if prompt.every_s > 0}

    def next(self, target: GoldenTarget, now_s: float) -> agent.GoldenPrompt | None:
        """Return the prompt that is overdue longest, platform prompts first, or None if none is."""
        if now_s < self._free_s.get(target.replica_id, 0.0):
            return None
        best, first = None, (True, now_s)
        for prompt in self._prompts.values():
            if prompt.base_digest != target.base_digest:
                continue
            due_s = self._due_s(target.replica_id, prompt, now_s)
            rank = not prompt.id.startswith(PLATFORM), due_s
            if due_s <= now_s and rank <= first:
                best, first = prompt, rank
        return best

    def accuse(self, replica_id: str, now_s: float) -> None:
        """Make all prompts of the platform due at once for a replica under suspicion."""
        self._accused_s[replica_id] = now_s

    def asked(self, replica_id: str, prompt_id: str, now_s: float) -> None:
        """Record that a golden request begins."""
        self._asked_s[replica_id, prompt_id] = now_s
        self._free_s[replica_id] = now_s + _PAUSE_S

    def forget(self, replica_ids: Iterable[str]) -> None:
        """Delete the times of all other replicas, and if too many are left, the oldest times."""
        kept = frozenset(replica_ids)
        if kept != self._replicas:
            self._replicas = kept
            self._free_s = {name: at for name, at in self._free_s.items() if name in kept}
            self._accused_s = {name: at for name, at in self._accused_s.items() if name in kept}
            self._asked_s = {pair: at for pair, at in self._asked_s.items() if pair[0] in kept}
        if len(self._asked_s) > _REMEMBERED_MAX:
            pairs = sorted(self._asked_s, key=self._worth)[-_REMEMBERED_MAX // 2 :]
            self._asked_s = {pair: self._asked_s[pair] for pair in pairs}

    def _worth(self, pair: tuple[str, str]) -> tuple[bool, float]:
        return pair[1] in self._prompts, self._asked_s[pair]

    def _due_s(self, replica_id: str, prompt: agent.GoldenPrompt, now_s: float) -> float:
        pair = (replica_id, prompt.id)
        share = crc32("/".join(pair).encode()) % 1024 / 1024
        interval_s = prompt.every_s * (1 - _JITTER / 2 + _JITTER * share)
        if pair not in self._asked_s:
            first_s = now_s + share * min(_FIRST_WITHIN_S, prompt.every_s)
            self._asked_s[pair] = first_s - interval_s
        due_s = self._asked_s[pair] + interval_s
        accused_s = self._accused_s.get(replica_id)
        if accused_s is None or not prompt.id.startswith(PLATFORM):
            return due_s
        return due_s if self._asked_s[pair] >= accused_s else min(due_s, accused_s)


class GoldenAsker:
    """Sends golden prompts to the replicas of the node, one at a time per replica."""

    def __init__(
        self,
        targets: Callable[[], Sequence[GoldenTarget]],
        observer: GoldenObserver,
        ask: Ask | None = None,
    ) -> None:
        """Create a sender without prompts.

        Args:
            targets: Function that returns the replicas that may receive a prompt at present.
            observer: Observer of golden requests, for metrics.
            ask: Function that sends one prompt, or None to use the engine's probe.
        """
        self._targets = targets
        self._observer = observer
        self._probe = ask or probe_engine
        self._schedule = GoldenSchedule()
        self._busy: set[str] = set()
        self._results: deque[agent.GoldenResult] = deque(maxlen=RESULTS_MAX)
        self._accused: dict[str, int] = {}

    def follow(self, desired: agent.SyncResponse) -> None:
        """Replace the prompts by those of a desired state."""
        if not desired.golden_unchanged:
            self._schedule.want(desired.golden_prompts)
        accused = {it.replica_id: it.accused_at_unix_ms for it in desired.replicas}
        for replica_id, at_unix_ms in accused.items():
            if at_unix_ms and self._accused.get(replica_id) != at_unix_ms:
                self._schedule.accuse(replica_id, time.monotonic())
        self._accused = accused

    def take(self) -> list[agent.GoldenResult]:
        """Return the results since the previous call of this method."""
        results = list(self._results)
        self._results.clear()
        return results

    async def run(self) -> None:
        """Send due prompts until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                targets = self._targets()
                self._schedule.forget(target.replica_id for target in targets)
                for target in targets:
                    if target.replica_id in self._busy:
                        continue
                    now_s = time.monotonic()
                    prompt = self._schedule.next(target, now_s)
                    if prompt is not None:
                        self._schedule.asked(target.replica_id, prompt.id, now_s)
                        self._busy.add(target.replica_id)
                        group.create_task(self._put(target, prompt))
                await asyncio.sleep(_LOOK_S)

    async def _put(self, target: GoldenTarget, prompt: agent.GoldenPrompt) -> None:
        """Send one prompt and store the answer."""
        result = agent.GoldenResult(
            replica_id=target.replica_id,
            prompt_id=prompt.id,
            asked_at_unix_ms=int(time.time() * 1000),
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                reply = await self._probe(target, prompt)
            result.token_ids.extend(reply.tokens)
            result.logprobs.extend(reply.logprobs)
        except (PlatformError, OSError, TimeoutError) as error:
            result.error = (str(error) or repr(error))[:_ERROR_MAX]
        finally:
            self._busy.discard(target.replica_id)
        self._observer.asked(is_answered=not result.error)
        self._results.append(result)


async def probe_engine(target: GoldenTarget, prompt: agent.GoldenPrompt) -> engine.ProbeReply:
    """Return the engine's answer, computed without cached blocks.

    Raises:
        WrongAnswerError: Another engine answered, or no frame arrived.
        FailedError: The engine does not answer.
    """
    count = max(1, min(prompt.output_tokens_max, OUTPUT_TOKENS_MAX))
    try:
        reply = await probe(
            target.address,
            LLM.model,
            prompt.token_ids,
            count,
            DEADLINE_S,
            adapter_digest=prompt.adapter_digest,
            cache_root=secrets.token_bytes(HASH_BYTES),
            wants_logprobs=True,
        )
    except DecodeError as error:
        message = f"{target.address} answered with an invalid frame: {error}"
        raise WrongAnswerError(message) from error
    check_engine(
        target.address,
        (reply.engine, reply.base_digest),
        (target.engine, target.base_digest),
    )
    return reply


def askable(runners: Iterable[ReplicaRunner]) -> list[GoldenTarget]:
    """Return the ready replicas that generate text, without draining and sleeping ones."""
    found: list[GoldenTarget] = []
    for runner in runners:
        spec, launch = runner.state.running, runner.launch
        state = runner.state
        is_awake = state.phase is ReplicaPhase.READY and not state.rest.is_hidden
        is_ready = is_awake and not runner.is_draining
        if not (is_ready and runner.is_wanted) or spec is None or launch is None:
            continue
        kind = KINDS.get(spec.engine)
        if kind is not None and kind.model == LLM.model:
            address = launch.grpc_address
            found.append(GoldenTarget(runner.replica_id, address, spec.engine, spec.base_digest))
    return found
