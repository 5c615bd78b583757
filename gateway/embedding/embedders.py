"""Sends each text directly to the least busy replica of its embedding pool.

No router is needed, because a text is one short request that any replica can compute. A text whose
replica is lost or fails is retried once on another replica.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import structlog

from gateway.embedding.standing import PAUSE_FIRST_S, EmbedderStanding, EmbedOutcome, choose
from gateway.pool_status import PoolStatus
from gateway.stopping import stopping
from sluice.embeddings import EmbeddingClient
from sluice.errors import (
    BadRequestError,
    EngineRefusal,
    ErrorCode,
    FailedError,
    PlatformError,
    RejectedError,
)
from sluice.profiles import EMBED
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control

if TYPE_CHECKING:
    from array import array

log = structlog.get_logger(__name__)

# Maximum number of texts of one request in flight. They fill one batch that the replica computes
# and one batch that waits.
WINDOW_TEXTS = 32
# Maximum number of texts in flight per replica. On a single core, the longest texts need 12 s.
IN_FLIGHT_MAX = 256
# Share of these places that requests below the highest tier may use.
_LOWER_TIERS_SHARE = 0.75
ANSWER_S = 30.0  # longest wait for one text, in seconds
ATTEMPTS_MAX = 2
# Seconds of one sleep of the silence check. A busy replica answers a batch at least every second,
# but may first compute the texts of other gateways. So a silent replica is ejected only if the pool
# has another replica. Silence is counted in sleeps of this process, so that a pause of this process
# does not count as silence.
NAP_S = 0.25
SILENT_NAPS_MAX = 12
_PROBE = (1, 2, 3, 4)  # token ids of the probe, which exist in every model's vocabulary
_PROBE_S = 10.0  # seconds for a probe, which waits in the replica's queue
_RETRY_S = 1.0
# States of replicas that receive texts. LOST means that the agent is silent, but the replica may
# still compute.
_USABLE = (control.REPLICA_STATE_READY, control.REPLICA_STATE_LOST)
_ENDED = (control.REPLICA_STATE_FAILED, control.REPLICA_STATE_STOPPED)

_FAILURES = {
    ErrorCode.UNAVAILABLE: "The chosen replica cannot be reached; try again.",
    ErrorCode.REPLICA_LOST: "The chosen replica fell silent or ended; try again.",
    ErrorCode.ENGINE_FAILED: "The engine failed on this input; try again, or send it in parts.",
}

Vector: TypeAlias = "array[float]"  # Python 3.11 cannot subscript the class


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica with its connection, and the deadlines of the texts that it computes."""

    pool_id: str
    address: str
    standing: EmbedderStanding
    client: EmbeddingClient
    waits: set[asyncio.Timeout] = field(default_factory=set)
    is_usable: bool = True
    silent_naps: int = 0

    def release(self) -> None:
        """End the waits for all texts at the replica, which are then sent to other replicas."""
        now_s = asyncio.get_running_loop().time()
        for wait in self.waits:
            wait.reschedule(now_s)
        self.waits.clear()


class Embedders:
    """The connections to all embedding replicas. `run` must run in the worker's TaskGroup."""

    def __init__(self, state: ControlState) -> None:
        """Start without connections. `update` must be called after each change of `state`."""
        self._state = state
        self._replicas: dict[str, _Replica] = {}
        self._leaving: list[_Replica] = []
        # Number of texts that the pool's open requests may have in flight, by pool id.
        self._open: dict[str, int] = {}
        self._idle = asyncio.Event()
        self._has_looks = asyncio.Event()  # set while a replica may need a check
        self._is_draining = self._is_stopping = False

    @property
    def open(self) -> int:
        """Number of texts that open requests may have in flight, over all pools."""
        return sum(self._open.values())

    @property
    def usable(self) -> int:
        """Number of replicas that accept texts now."""
        return sum(r.is_usable and r.standing.is_trusted for r in self._replicas.values())

    def status(self, pool_id: str, replicas_starting: int) -> PoolStatus:
        """Return the state of a pool. Its counts of texts include only texts of this gateway."""
        serving = [r for r in self._usable(pool_id) if r.standing.is_trusted]
        return PoolStatus(
            replicas_ready=len(serving),
            replicas_starting=replicas_starting,
            running=self._open.get(pool_id, 0),
        )

    def update(self) -> None:
        """Connect to new replicas, and stop sending texts to replicas that end."""
        for replica_id, told in self._state.replicas.items():
            if told.profile != EMBED.name or not told.grpc_address:
                continue
            known = self._replicas.get(replica_id)
            if known is not None and known.address != told.grpc_address:
                self._leave(replica_id)
                known = None
            if known is None and told.state in _USABLE:
                self._replicas[replica_id] = _connect(told)
            elif known is not None:
                is_usable = told.state in _USABLE
                if is_usable and not known.is_usable:  # the agent has tested the replica
                    known.standing.forgive()
                known.is_usable = is_usable
        for replica_id in tuple(self._replicas):
            told = self._state.replicas.get(replica_id)
            if told is None or told.state in _ENDED:
                self._leave(replica_id)

    def _leave(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id)
        replica.release()
        self._leaving.append(replica)
        self._has_looks.set()

    async def run(self) -> None:
        """Eject silent replicas, probe ejected ones, and close unused connections, until cancelled.

        Cancellation closes all connections, and `embed` must not be called afterwards.
        """
        try:
            async with asyncio.TaskGroup() as probes:
                while True:
                    await self._has_looks.wait()
                    await asyncio.sleep(NAP_S)
                    for replica in tuple(self._replicas.values()):
                        self._judge_silence(replica)
                        if replica.standing.starts_probe(_now_s()):
                            probes.create_task(_probe(replica))
                    await self._close_left()
                    if self._is_quiet:
                        self._has_looks.clear()
        finally:
            for replica in (*self._replicas.values(), *self._leaving):
                await replica.client.close()

    @property
    def _is_quiet(self) -> bool:
        """Whether no replica has a text, is ejected or leaves, so that nothing needs a check."""
        standings = [replica.standing for replica in self._replicas.values()]
        has_work = any(it.in_flight or not it.is_trusted for it in standings)
        return not (has_work or self._leaving)

    async def _close_left(self) -> None:
        left = [r for r in self._leaving if not (r.standing.in_flight or r.standing.is_probed)]
        self._leaving = [r for r in self._leaving if r not in left]
        for replica in left:
            await replica.client.close()

    def _judge_silence(self, replica: _Replica) -> None:
        if not replica.standing.in_flight:
            replica.silent_naps = 0
            return
        replica.silent_naps += 1
        if replica.silent_naps < SILENT_NAPS_MAX:
            return
        others = [r.standing for r in self._usable(replica.pool_id) if r is not replica]
        if any(other.is_trusted for other in others):
            standing, replica.silent_naps = replica.standing, 0
            log.warning("embedder_ejected", replica_id=standing.replica_id, reason="silent")
            standing.eject(_now_s())
            replica.release()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new texts, wait for open texts, and return how many are left at the deadline."""
        self._is_draining = True
        if self.open:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return self.open

    def stop_all(self) -> None:
        """Refuse all running and later texts, because the process is about to exit."""
        self._is_stopping = True
        for replica in self._replicas.values():
            replica.release()

    async def embed(
        self,
        pool_id: str,
        texts: Sequence[Sequence[int]],
        begin: Callable[[int], None],
        take: Callable[[int, Vector], None],
        *,
        give_up_at_s: float,
        is_highest: bool,
    ) -> None:
        """Compute the embeddings of all texts. If one text fails, the others are cancelled.

        Args:
            pool_id: Pool whose replicas compute.
            texts: Token ids of at least one text, including special tokens.
            begin: Called with the index of each text before the text is sent to a replica.
            take: Called with the index and the vector of each text, in any order.
            give_up_at_s: Loop time at which the call fails.
            is_highest: Whether no tier has a higher priority than the caller's tier.

        Raises:
            RejectedError: No replica is free (NO_CAPACITY, QUEUE_FULL, UNAVAILABLE or DRAINING).
            FailedError: The replicas failed (UNAVAILABLE, REPLICA_LOST or ENGINE_FAILED).
            BadRequestError: A replica refuses a text.
        """
        width = min(len(texts), WINDOW_TEXTS)
        self._admit(pool_id, width, is_highest=is_highest)
        numbered = iter(enumerate(texts))
        try:
            if width == 1:
                await self._embed_each(pool_id, numbered, begin, take, give_up_at_s)
            else:
                await self._embed_side_by_side(width, pool_id, numbered, begin, take, give_up_at_s)
        finally:
            self._open[pool_id] -= width
            if not self._open[pool_id]:
                del self._open[pool_id]
                if not self._open:
                    self._idle.set()

    def _admit(self, pool_id: str, width: int, *, is_highest: bool) -> None:
        if self._is_draining:
            raise stopping()
        self.require_room(pool_id, width, is_highest=is_highest)
        self._open[pool_id] = self._open.get(pool_id, 0) + width

    def require_room(self, pool_id: str, width: int, *, is_highest: bool) -> None:
        """Check that a pool has places for `width` texts in flight.

        Lower tiers are refused first, so that they do not delay the highest tier.

        Raises:
            RejectedError: No replica is usable (NO_CAPACITY), or no place is free (QUEUE_FULL).
        """
        usable = self._usable(pool_id)
        if not usable:
            text = "No replica serves this model at the moment; try again shortly."
            raise RejectedError(ErrorCode.NO_CAPACITY, text, retry_after_s=2.0)
        under_way = self._open.get(pool_id, 0)
        places = IN_FLIGHT_MAX * len(usable)
        if under_way + width > (places if is_highest else _LOWER_TIERS_SHARE * places):
            text = f"The queue is full, with {under_way} texts; try again shortly."
            raise RejectedError(ErrorCode.QUEUE_FULL, text, retry_after_s=_RETRY_S)

    def _usable(self, pool_id: str) -> list[_Replica]:
        return [r for r in self._replicas.values() if r.pool_id == pool_id and r.is_usable]

    async def _embed_side_by_side(
        self,
        width: int,
        pool_id: str,
        numbered: "Iterator[tuple[int, Sequence[int]]]",
        begin: Callable[[int], None],
        take: Callable[[int, Vector], None],
        give_up_at_s: float,
    ) -> None:
        failure: PlatformError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(width):
                    each = self._embed_each(pool_id, numbered, begin, take, give_up_at_s)
                    tasks.create_task(each)
        except* PlatformError as errors:
            failure = next(e for e in errors.exceptions if isinstance(e, PlatformError))
        if failure is not None:
            raise failure

    async def _embed_each(
        self,
        pool_id: str,
        numbered: "Iterator[tuple[int, Sequence[int]]]",
        begin: Callable[[int], None],
        take: Callable[[int, Vector], None],
        give_up_at_s: float,
    ) -> None:
        for index, tokens in numbered:
            begin(index)
            take(index, await self._embed_one(pool_id, tokens, give_up_at_s))

    async def _embed_one(self, pool_id: str, tokens: Sequence[int], give_up_at_s: float) -> Vector:
        tried: list[str] = []
        failure: FailedError | None = None
        while len(tried) < ATTEMPTS_MAX and not self._is_stopping:
            usable = {r.standing.replica_id: r for r in self._usable(pool_id)}
            standings = [r.standing for r in usable.values()]
            chosen = choose(standings, tried)
            if chosen is None:
                raise failure or _all_ejected(standings)
            tried.append(chosen.replica_id)
            self._has_looks.set()
            try:
                return await _call(usable[chosen.replica_id], tokens, give_up_at_s)
            except FailedError as error:
                if not error.code.policy.is_tried_elsewhere:
                    raise
                failure = error
        if self._is_stopping:
            raise stopping()
        assert failure is not None, "every attempt returned or failed"
        raise failure


async def _call(replica: _Replica, tokens: Sequence[int], give_up_at_s: float) -> Vector:
    """Return a replica's vector for a text, and record the outcome for the replica."""
    standing, begun_at_s = replica.standing, _now_s()
    left_s = give_up_at_s - begun_at_s
    if left_s <= 0:
        raise _too_late()
    outcome, reason = EmbedOutcome.UNKNOWN, ""
    standing.begin(begun_at_s)
    wait = asyncio.timeout(None)
    try:
        async with wait:
            replica.waits.add(wait)
            embedding = await replica.client.embed(tokens, timeout_s=min(left_s, ANSWER_S))
    except TimeoutError:
        raise _failed(ErrorCode.REPLICA_LOST) from None
    except FailedError as error:
        if error.code is ErrorCode.REPLICA_LOST and left_s < ANSWER_S:
            raise _too_late() from error  # the short wait is no evidence against the replica
        is_gone = error.code.policy.from_engine is not EngineRefusal.FAILED
        outcome, reason = (
            (EmbedOutcome.UNREACHABLE if is_gone else EmbedOutcome.FAILED),
            error.message,
        )
        raise _failed(error.code) from error
    except BadRequestError:
        outcome = EmbedOutcome.ANSWERED
        raise
    else:
        outcome = EmbedOutcome.ANSWERED
        return embedding.values
    finally:
        replica.waits.discard(wait)
        if outcome is not EmbedOutcome.UNKNOWN:
            replica.silent_naps = 0
        strikes = standing.strikes
        standing.end(outcome, begun_at_s, _now_s())
        if standing.strikes > strikes:
            log.warning("embedder_ejected", replica_id=standing.replica_id, reason=reason)


async def _probe(replica: _Replica) -> None:
    """Send a probe to an ejected replica, and record the probe's outcome."""
    standing, outcome = replica.standing, EmbedOutcome.UNKNOWN
    try:
        await replica.client.embed(_PROBE, timeout_s=_PROBE_S)
        outcome = EmbedOutcome.ANSWERED
        log.info("embedder_readmitted", replica_id=standing.replica_id)
    except BadRequestError:
        outcome = EmbedOutcome.ANSWERED
    except PlatformError:
        outcome = EmbedOutcome.UNREACHABLE
    finally:
        standing.end_probe(outcome, _now_s())


def _connect(told: control.Replica) -> _Replica:
    log.info("embedder_connected", replica_id=told.id, address=told.grpc_address)
    model = told.triton_model or EMBED.triton_model
    return _Replica(
        pool_id=told.pool_id,
        address=told.grpc_address,
        standing=EmbedderStanding(told.id),
        client=EmbeddingClient(told.grpc_address, model, in_flight_max=IN_FLIGHT_MAX),
    )


def _all_ejected(standings: Sequence[EmbedderStanding]) -> RejectedError:
    if not standings:
        text = "No replica serves this model at the moment; try again shortly."
        return RejectedError(ErrorCode.NO_CAPACITY, text, retry_after_s=2.0)
    text = "The replicas of this model have just failed; they are tried again in a moment."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=PAUSE_FIRST_S)


def _failed(code: ErrorCode) -> FailedError:
    """Return the error for the client, which does not name the replica's address."""
    return FailedError(code, _FAILURES[code], retry_after_s=_RETRY_S)


def _too_late() -> FailedError:
    text = "The embeddings were not computed before the deadline; send fewer texts at once."
    return FailedError(ErrorCode.DEADLINE_EXCEEDED, text, retry_after_s=_RETRY_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
