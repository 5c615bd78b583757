"""A request, its dispatches to replicas, and its gateway."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from router.core.types.account import ServiceAccount
from router.core.types.batch import GatewayBatch
from sluice.wire.router.v1 import router_pb2 as wire

UNLIMITED = 1 << 30  # output tokens: the context is the limit


class RequestState(IntEnum):
    """A request moves between QUEUED and RUNNING until it is DONE, once."""

    QUEUED = 1
    RUNNING = 2
    DONE = 3


class FirstTokenPrediction(Protocol):
    """A predicted TTFT that learns from the real one."""

    def ttft_s(self) -> float:
        """Return the predicted seconds until the first token."""
        ...

    def first_token(self, waited_s: float) -> None:
        """Learn from a first token after this many seconds."""
        ...

    def expired(self, waited_s: float) -> None:
        """Learn from a request that has no first token after this many seconds."""
        ...


class ConnectedGateway:
    """A connected gateway worker.

    Attributes:
        requests: Live requests by handle.
        batch: News for its next message.
    """

    __slots__ = ("batch", "key", "requests")

    def __init__(self, key: int) -> None:
        self.key = key
        self.requests: dict[int, Request] = {}
        self.batch = GatewayBatch()


class Request:
    """A request, from submit to its single outcome. The shell makes it, the core owns it.

    Decisions read the attributes; the engine alone needs `payload`, which the core drops at the
    end. The core writes the attributes from `gateway` on.

    Attributes:
        prompt_tokens: Size of the prompt; after a resume with the tokens emitted before.
        output_max: Tokens that may be generated.
        priority: Priority of the tier; higher goes first.
        reserved_permille: Share of the cell that the tier gets at least while it has work.
        is_preemptible: Batch work, which may be interrupted while it runs and is shed first.
        weight: Share of the tenant within its tier.
        deadline_s: Seconds from arrival to the first token; 0: the default.
        admission_s: Seconds to the first token, without its own prefill, with which it is admitted;
            0: until the deadline.
        hashes: Hashes of the prompt's full KV blocks, in order.
        absence_s: Seconds of waiting for a cell without replicas; 0: until the deadline.
        session: Hash of the session; 0: none.
        adapter: Digest; empty: the base.
        order: Number of the arrival; also the tie-break everywhere.
        avoid: Replica of the last failed dispatch.
        uncached_tokens: Prompt tokens that the best replica would have to compute; a prediction.
        objective_s: Objective of the TTFT, in seconds.
        late_at: Time from which no replica can meet the objective.
        is_late: Whether that time came while the request waited.
        overdue_at: Time from which no request of the tier overtakes this one.
        output: Emitted tokens; kept for preemptible requests only.
        is_charged: Whether the tenant has paid for the prompt.
        charged_tokens: Prompt tokens that the tenant has paid for.
        prediction: Prediction of the first token's time; learns once from the real one.
        prefilled_on: Replica that computed the prompt for another replica.
        is_traced: Whether the placement is worth an explanation: the trace is sampled, or the
            answer began elsewhere.
        interrupted: Dispatches that ended without an end of the request.
        output_expected: Output tokens expected at its arrival.
        untold: Number of `output_expected` that the gateway has not received; None: none.
    """

    __slots__ = (
        *("handle", "cell_id", "tenant_id", "request_id", "prompt_tokens", "output_max"),
        *("priority", "reserved_permille", "is_preemptible", "weight", "deadline_s", "hashes"),
        *("admission_s", "absence_s", "session", "adapter", "payload", "is_traced"),
        *("gateway", "order", "arrived_at", "deadline_at", "state", "dispatch", "attempts"),
        *("avoid", "uncached_tokens", "objective_s", "late_at", "is_late", "overdue_at", "output"),
        *("is_charged", "charged_tokens", "preemptions", "prediction", "prefilled_on"),
        *("interrupted", "output_expected", "untold"),
    )

    def __init__(
        self,
        *,
        handle: int,
        cell_id: str,
        prompt_tokens: int,
        output_max: int = 0,
        tenant_id: str = "",
        request_id: str = "",
        priority: int = 0,
        reserved_permille: int = 0,
        is_preemptible: bool = False,
        weight: int = 1,
        deadline_s: float = 0.0,
        admission_s: float = 0.0,
        absence_s: float = 0.0,
        hashes: Sequence[int] = (),
        session: int = 0,
        adapter: str = "",
        payload: wire.Submit | None = None,
        is_traced: bool = False,
    ) -> None:
        self.handle = handle
        self.cell_id = cell_id
        self.tenant_id = tenant_id
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_max = output_max or UNLIMITED
        self.priority = priority
        self.reserved_permille = reserved_permille
        self.is_preemptible = is_preemptible
        self.weight = weight or 1
        self.deadline_s = deadline_s
        self.admission_s = admission_s
        self.absence_s = absence_s
        self.hashes = hashes
        self.session = session
        self.adapter = adapter
        self.payload = payload
        self.is_traced = is_traced
        self.gateway: ConnectedGateway = _NO_GATEWAY
        self.order = 0
        self.arrived_at = 0.0
        self.deadline_at = 0.0
        self.state = RequestState.QUEUED
        self.dispatch: Dispatch | None = None
        self.attempts = 0
        self.avoid = ""
        self.uncached_tokens, self.output_expected = prompt_tokens, 0
        self.objective_s = 0.0
        self.late_at = self.overdue_at = float("inf")
        self.is_late = False
        self.output: list[int] | None = [] if is_preemptible else None
        self.is_charged = False
        self.charged_tokens = self.preemptions = 0
        self.prediction: FirstTokenPrediction | None = None
        self.prefilled_on = ""
        self.interrupted = 0
        self.untold: list[wire.Interruption] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the request has its outcome."""
        return self.state is RequestState.DONE

    def longest_wait_s(self, default_s: float) -> float:
        """Return the longest wait for a first token, in seconds."""
        return self.deadline_s or max(default_s, self.admission_s)

    @property
    def is_begun(self) -> bool:
        """Whether the client has a part of the answer already: a refusal would break it."""
        submit = self.payload
        return submit is not None and (submit.resumed_tokens > 0 or submit.is_begun)


_NO_GATEWAY = ConnectedGateway(0)  # until a request is submitted


class Dispatch:
    """A sequence on one replica: a request's dispatch, from submit to the engine's end.

    A dispatch outlives its request when that was cancelled or preempted: the engine still holds the
    sequence until it reports the end.

    Attributes:
        account: The tenant's account; the token path adds to it.
        charge: Virtual service of the tenant per output token.
        prefill_owed: Prompt tokens that the engine has not computed, by the router's books.
        cached_tokens: Prompt tokens found in the cache; predicted until the engine reports them.
        output_booked: Output tokens that KV blocks are booked for.
        emitted: Tokens that the engine has reported.
        first_at: Time of the first token; 0.0 before it.
        slack_s: `EngineModel.slack_s` of the replica at the first token.
        is_admitted: Whether the engine runs the sequence.
        is_open: Whether the request still waits for these tokens.
        is_placed: Whether the gateway knows the replica.
        is_prefill: Whether the sequence ends with its first token and the answer goes on elsewhere.
        decision: Explanation of the placement; kept of a sample only.
        known: Predicted cost and TTFT, in seconds, and waiting requests; set where `decision` is
            not.
    """

    __slots__ = (
        *("request", "gateway", "handle", "account", "charge", "replica_id", "sequence"),
        *("prompt_tokens", "prefill_owed", "cached_tokens", "output_booked", "output_max"),
        *("kv_blocks", "dispatched_at", "emitted", "first_at", "slack_s", "is_admitted"),
        *("is_open", "output", "is_placed", "decision", "known", "is_prefill"),
    )

    def __init__(
        self,
        request: Request,
        account: ServiceAccount,
        replica_id: str,
        *,
        sequence: int,
        now: float,
    ) -> None:
        self.request = request
        self.gateway = request.gateway
        self.handle = request.handle
        self.account = account
        self.charge = 2.0 / account.weight
        self.replica_id = replica_id
        self.sequence = sequence
        self.output = request.output
        self.prompt_tokens = request.prompt_tokens + (len(self.output) if self.output else 0)
        self.prefill_owed = self.prompt_tokens
        self.cached_tokens = 0
        self.output_booked = 0
        self.output_max = 0
        self.kv_blocks = 0
        self.dispatched_at = now
        self.emitted = 0
        self.first_at = 0.0
        self.slack_s = 0.0
        self.is_admitted = False
        self.is_open = True
        self.is_placed = False
        self.is_prefill = False
        self.decision: wire.Explanation | None = None
        self.known: tuple[float, float, int] | None = None
