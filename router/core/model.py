"""The words of the router's decisions: what comes in, what is kept, what goes out.

Times are monotonic seconds given by the caller; durations are seconds, sizes are tokens.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum

from sluice.wire.router.v1 import router_pb2 as wire

_UNLIMITED = 1 << 30  # the context is the limit


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and constants of the core; per cell where a queue is meant."""

    queue_requests_max: int = 4096
    queue_tokens_max: int = 8_000_000  # prompt tokens
    deadline_default_s: float = 30.0
    retries_max: int = 2  # dispatches after the first one that may be lost or fail
    window_min_s: float = 0.02  # late binding: a replica's predicted backlog stays below the window
    busy_pause_s: float = 0.02  # after an engine's "busy", nothing is sent to it for this long
    draining_pause_s: float = 1.0  # a draining one needs longer, or is replaced
    cell_state_interval_s: float = 0.1
    output_tokens_expected: int = 256  # until the cell has seen answers end


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A replica that the control plane has put into one of our cells."""

    replica_id: str
    cell_id: str
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine says it can hold, once per attachment."""

    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    block_tokens: int
    prompt_tokens_max: int = field(init=False)  # leaves room for one token of output

    def __post_init__(self) -> None:
        """Derive what placement asks for often."""
        longest = min(self.context_tokens_max, self.kv_blocks * self.block_tokens) - 1
        object.__setattr__(self, "prompt_tokens_max", longest)


class State(IntEnum):
    """Where a request is; it moves between QUEUED and RUNNING until it is DONE, once."""

    QUEUED = 1
    RUNNING = 2
    DONE = 3


class Batch:
    """What one gateway is told next: delta columns, placements, outcomes, cell states."""

    __slots__ = ("cells", "counts", "handles", "outcomes", "placed", "tokens")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.placed: list[wire.Placed] = []
        self.outcomes: list[wire.Outcome] = []
        self.cells: list[wire.CellState] = []

    def merge(self, later: "Batch") -> None:
        """Add what came later; outcomes still stand behind all tokens."""
        self.handles += later.handles
        self.counts += later.counts
        self.tokens += later.tokens
        self.placed += later.placed
        self.outcomes += later.outcomes
        self.cells += later.cells

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.handles or self.outcomes or self.placed or self.cells)


class Gateway:
    """One connected gateway worker: its live requests by handle, and what it is told next."""

    __slots__ = ("batch", "key", "requests")

    def __init__(self, key: int) -> None:
        self.key = key
        self.requests: dict[int, Request] = {}
        self.batch = Batch()


class Request:
    """One accepted request, from submit to its single outcome."""

    __slots__ = (
        "arrived_at",
        "attempts",
        "avoid",
        "cell_id",
        "deadline_at",
        "gateway",
        "handle",
        "order",
        "output_max",
        "priority",
        "prompt_tokens",
        "slot",
        "state",
        "submit",
        "tenant_id",
        "weight",
    )

    def __init__(
        self, gateway: Gateway, submit: wire.Submit, *, order: int, now: float, deadline_s: float
    ) -> None:
        self.gateway = gateway
        self.handle = submit.handle
        self.submit: wire.Submit | None = submit  # given up at the end: it holds the prompt
        self.cell_id = submit.cell_id
        self.tenant_id = submit.tenant_id
        self.priority = submit.tier_priority
        self.weight = submit.tenant_weight or 1
        self.prompt_tokens = len(submit.prompt)
        self.output_max = submit.output_tokens_max or _UNLIMITED
        self.arrived_at = now
        self.deadline_at = now + deadline_s
        self.order = order  # of arrival; also the tie-break everywhere
        self.attempts = 0
        self.avoid = ""  # the replica where it failed last
        self.slot: Slot | None = None
        self.state = State.QUEUED


class Tenant:
    """One tenant's place in one tier: its counter and its waiting requests."""

    __slots__ = ("counter", "is_listed", "requests", "tenant_id", "weight")

    def __init__(self, tenant_id: str, counter: float) -> None:
        self.tenant_id = tenant_id
        self.counter = counter  # virtual service received: tokens by weight
        self.weight = 1
        self.requests: OrderedDict[int, Request] = OrderedDict()  # by order of arrival
        self.is_listed = False  # stands in its tier's heap


class Slot:
    """One sequence on one replica: a request's dispatch, from submit to the engine's last word.

    A slot outlives its request when that was cancelled: the engine still holds the sequence until
    it reports the end.
    """

    __slots__ = (
        "charge",
        "dispatched_at",
        "emitted",
        "gateway",
        "handle",
        "is_open",
        "is_placed",
        "kv_blocks",
        "output_booked",
        "output_max",
        "prefill_owed",
        "prompt_tokens",
        "replica_id",
        "request",
        "sequence",
        "tenant",
    )

    def __init__(
        self, request: Request, tenant: Tenant, replica_id: str, *, sequence: int, now: float
    ) -> None:
        self.request = request
        self.gateway = request.gateway
        self.handle = request.handle
        self.tenant = tenant
        self.charge = 2.0 / tenant.weight  # virtual service per output token
        self.replica_id = replica_id
        self.sequence = sequence
        self.prompt_tokens = request.prompt_tokens
        self.prefill_owed = request.prompt_tokens
        self.output_booked = 0
        self.output_max = 0
        self.kv_blocks = 0
        self.dispatched_at = now
        self.emitted = 0
        self.is_open = True  # somebody still wants its tokens
        self.is_placed = False


@dataclass(slots=True)
class Actions:
    """What the shell has to do now."""

    batches: list[tuple[int, Batch]] = field(default_factory=list[tuple[int, Batch]])
    dispatches: dict[str, list[Slot]] = field(default_factory=dict[str, list[Slot]])
    cancels: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


@dataclass(slots=True)
class Stats:
    """Running totals and samples since the shell last took them; for metrics only."""

    outcomes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    ttft_s: list[float] = field(default_factory=list[float])
    queue_s: list[float] = field(default_factory=list[float])
    tokens: int = 0
    requeues: int = 0
    stray_tokens: int = 0  # of sequences the books do not know
    count_mismatches: int = 0  # engine and router disagree on a sequence's tokens
