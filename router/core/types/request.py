"""A request, its dispatches to replicas, and its gateway."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from router.core.types.account import ServiceAccount
from router.core.types.batch import GatewayBatch
from sluice.wire.router.v1 import router_pb2 as wire

UNLIMITED = 1 << 30  # `output_max` of a request that only the engine's context length limits


class RequestState(IntEnum):
    """The state of a request, which may return from RUNNING to QUEUED but never leaves DONE."""

    QUEUED = 1
    RUNNING = 2
    DONE = 3


class FirstTokenPrediction(Protocol):
    """A TTFT prediction, which is compared with the measured TTFT to correct later predictions."""

    def ttft_s(self) -> float:
        """Return the predicted seconds until the first token."""
        ...

    def first_token(self, waited_s: float) -> None:
        """Correct later predictions by a first token that arrived after `waited_s` seconds."""
        ...

    def expired(self, waited_s: float) -> None:
        """Correct later predictions by a request without a first token after `waited_s` seconds."""
        ...


class ConnectedGateway:
    """A connected gateway worker.

    Attributes:
        requests: Live requests by handle.
        batch: Contents of the next message to the gateway.
    """

    __slots__ = ("batch", "key", "requests")

    def __init__(self, key: int) -> None:
        self.key = key
        self.requests: dict[int, Request] = {}
        self.batch = GatewayBatch()


class Request:
    """A request from submit to its single outcome, created by the shell and changed by the core.

    Decisions read the attributes. Only the engine needs `payload`, which the core drops when the
    request ends. The shell passes the arguments of `__init__`, and the core sets the rest.

    Attributes:
        prompt_tokens: Tokens of the prompt, including the emitted tokens of a resumed answer.
        output_max: Most output tokens.
        priority: Priority of the tier. A higher priority is served first.
        reserved_permille: Least share of the cell for the tier while the tier has work, in
            thousandths.
        is_preemptible: Whether the request is batch work, which may be preempted and is shed first.
        weight: Share of the tenant within its tier.
        deadline_s: Seconds from arrival to the first token, or 0 for the default.
        admission_s: Longest predicted TTFT at admission, without the request's own prefill, in
            seconds, or 0 to apply the deadline.
        hashes: Hashes of the prompt's full KV blocks, in order.
        absence_s: Longest wait for a cell without replicas, in seconds, or 0 to wait until the
            deadline.
        session: Hash of the session, or 0 without a session.
        adapter: Digest of the adapter, or empty for the base without an adapter.
        order: Number of the arrival, which also breaks ties in all decisions.
        avoid: Replica of the last failed dispatch.
        uncached_tokens: Prompt tokens that the best replica is predicted to compute.
        objective_s: Objective of the TTFT, in seconds.
        late_at: Time from which no replica can meet the objective.
        is_late: Whether the request still waited at `late_at`.
        overdue_at: Time from which no request of the tier overtakes this request.
        output: Emitted tokens of a preemptible or split request, otherwise None.
        is_charged: Whether the tenant's account was charged for the prompt.
        charged_tokens: Prompt tokens that the tenant's account was charged for.
        prediction: TTFT prediction, which learns once from the measured TTFT.
        prefilled_on: Replica that computed the prompt for another replica.
        is_traced: Whether to explain the placement, because the trace is sampled or the answer
            began on another replica.
        interrupted: Number of dispatches that ended without ending the request.
        output_expected: Output tokens expected at the request's arrival.
        untold: Interruptions that were not yet sent to the gateway, or None if there are none.
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
        """Whether the client already has a part of the answer, which a refusal would truncate."""
        submit = self.payload
        return submit is not None and (submit.resumed_tokens > 0 or submit.is_begun)

    @property
    def is_again(self) -> bool:
        """Whether the gateway has submitted the request before, to this or to another pool."""
        return self.payload is not None and self.payload.attempt > 0


_NO_GATEWAY = ConnectedGateway(0)  # placeholder until a request is submitted


class Dispatch:
    """A request's sequence on one replica, from the dispatch until the engine reports its end.

    After a cancellation or preemption, the request no longer waits for the dispatch. The dispatch
    still exists until the engine reports the end of the sequence.

    Attributes:
        account: The tenant's account, to which the token path adds the output.
        charge: Virtual service of the tenant per output token.
        prefill_owed: Prompt tokens that the engine has not computed, as the router estimates.
        cached_tokens: Prompt tokens found in the cache, predicted until the engine reports them.
        output_booked: Output tokens that KV blocks are reserved for.
        emitted: Tokens that the engine has reported.
        first_at: Time of the first token, or 0.0 before it.
        slack_s: `EngineModel.slack_s` of the replica at the first token.
        is_admitted: Whether the engine runs the sequence.
        is_open: Whether the request still waits for tokens of this sequence.
        is_placed: Whether the gateway has been sent the replica's id.
        is_prefill: Whether this sequence only computes the prompt and the first token, after
            which another replica continues the answer.
        decision: Explanation of the placement, stored for a sample of dispatches only.
        known: Predicted cost and backlog of the replica, in seconds, and number of waiting
            requests. Set if `decision` is not.
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
