"""The words of the router's decisions: what comes in, what is kept, what goes out.

Times are monotonic seconds given by the caller; durations are seconds, sizes are tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from router.core.decide.forecast import Prediction
    from router.core.queue.fair_queue import Tenant
    from sluice.wire.engine.v1 import engine_pb2 as engine

UNLIMITED = 1 << 30  # output tokens: the context is the limit
_U32_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and constants of the core; per cell where a queue is meant.

    Attributes:
        queue_requests_max: Waiting requests.
        queue_tokens_max: Waiting prompt tokens.
        tenant_requests_max: Waiting requests of one tenant.
        tenant_tokens_max: Waiting prompt tokens of one tenant.
        deadline_default_s: Until the first token, for requests that name none.
        retries_max: Dispatches after the first one that may be lost or fail.
        busy_pause_s: After an engine's "busy", nothing is sent to it for this long.
        draining_pause_s: A draining one needs longer, or is replaced.
        cell_state_interval_s: Between two broadcasts of a cell's state.
        output_tokens_expected: Until the cell has seen answers end.
        ttft_base_s: The objective of a request's TTFT is this ...
        ttft_factor: ... and so many times its prefill on an idle replica.
        tpot_s: The objective of the mean time per output token.
        overtake_factor: A request that has waited this many times its own objective is overtaken
            by nobody of its tier.
        decision_sample: One of so many placements is explained in `Placed.decision`; 0: none.
        decision_pause_s: Between two further explanations, of placements of requests that are
            traced, late, or were placed before; inf: none.
    """

    queue_requests_max: int = 4096
    queue_tokens_max: int = 8_000_000
    tenant_requests_max: int = 4096
    tenant_tokens_max: int = 8_000_000
    deadline_default_s: float = 30.0
    retries_max: int = 2
    busy_pause_s: float = 0.02
    draining_pause_s: float = 1.0
    cell_state_interval_s: float = 0.1
    output_tokens_expected: int = 256
    ttft_base_s: float = 0.5
    ttft_factor: float = 2.0
    tpot_s: float = 0.1
    overtake_factor: float = 48.0
    decision_sample: int = 0
    decision_pause_s: float = float("inf")


class Role(IntEnum):
    """What a replica is for; BOTH unless its pool disaggregates."""

    BOTH = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A replica that the control plane has put into one of our cells."""

    replica_id: str
    cell_id: str
    is_draining: bool = False
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine says it can hold, once per attachment."""

    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    block_tokens: int
    adapter_slots: int = 0  # 0: no adapter can be served
    features: frozenset[str] = frozenset()
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
    """What one gateway is told next: delta columns, placements, outcomes, cell states.

    Attributes:
        logprobs: Of tokens of those who asked, by handle; None: of nobody.
    """

    __slots__ = ("cells", "counts", "handles", "logprobs", "outcomes", "placed", "tokens")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: engine.Logprobs | None = None
        self.placed: list[wire.Placed] = []
        self.outcomes: list[wire.Outcome] = []
        self.cells: list[wire.CellState] = []

    def merge(self, later: "Batch") -> None:
        """Add what came later; outcomes still stand behind all tokens."""
        self.handles += later.handles
        self.counts += later.counts
        self.tokens += later.tokens
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.MergeFrom(later.logprobs)  # columns are appended
        self.placed += later.placed
        self.outcomes += later.outcomes
        self.cells += later.cells

    @property
    def entries(self) -> int:
        """Tokens, and alternatives to them: what makes its size."""
        return len(self.tokens) + (0 if self.logprobs is None else len(self.logprobs.top_token))

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
    """One request, from submit to its single outcome. The shell makes it, the core owns it.

    What decisions need stands here; `payload` is what only the engine needs, and is given up at
    the end. The second half of the attributes belongs to the core.

    Attributes:
        prompt_tokens: Size of the prompt; with what was emitted before, after a resume.
        output_max: Tokens that may be generated.
        priority: Of its tier; higher goes first.
        reserved_permille: Share of the cell that its tier gets at least while it has work.
        is_preemptible: Batch work: may be interrupted while it runs, and is shed first.
        weight: Share of the tenant within its tier.
        deadline_s: From arrival to the first token; 0 is the default.
        absence_s: It waits so long for a cell without replicas; 0: until its deadline.
        hashes: Of the prompt's full KV blocks, in order; any hashables.
        session: 0 is none.
        adapter: Digest; empty is the base.
        order: Of arrival; also the tie-break everywhere.
        uncached_tokens: Prompt tokens that the best replica would have to compute; a prediction.
        objective_s: Until the first token.
        late_at: From then on it cannot meet its objective, wherever it goes.
        is_late: That time has come while it waited.
        overdue_at: From then on nobody of its tier overtakes it.
        avoid: The replica where it failed last.
        output: What was emitted; kept for preemptible requests only.
        prediction: Of its first token; told once what became of it.
        prefilled_on: The replica that computed its prompt for another one; see `disaggregation`.
        is_traced: Its trace is kept, or it goes on with an answer that was begun elsewhere: its
            placement is worth explaining.
        interrupted: Its dispatches that ended without ending it, all of them ...
        untold: ... and those of which its gateway was not told yet; None: none.
    """

    __slots__ = (
        *("handle", "cell_id", "tenant_id", "request_id", "prompt_tokens", "output_max"),
        *("priority", "reserved_permille", "is_preemptible", "weight", "deadline_s", "hashes"),
        *("absence_s", "session", "adapter", "payload"),
        *("gateway", "order", "arrived_at", "deadline_at", "state", "slot", "attempts", "avoid"),
        *("uncached_tokens", "objective_s", "late_at", "is_late", "overdue_at", "output"),
        "is_charged",
        "charged_tokens",
        *("preemptions", "prediction", "prefilled_on", "is_traced", "interrupted", "untold"),
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
        absence_s: float = 0.0,
        hashes: Sequence[Hashable] = (),
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
        self.absence_s = absence_s
        self.hashes = hashes
        self.session = session
        self.adapter = adapter
        self.payload = payload
        self.gateway: Gateway = _NOBODY
        self.order = 0
        self.arrived_at = 0.0
        self.deadline_at = 0.0
        self.state = State.QUEUED
        self.slot: Slot | None = None
        self.attempts = 0
        self.avoid = ""
        self.uncached_tokens = prompt_tokens
        self.objective_s = 0.0
        self.late_at = self.overdue_at = float("inf")
        self.is_late = False
        self.output: list[int] | None = [] if is_preemptible else None
        self.is_charged = False  # its tenant has paid for the prompt
        self.charged_tokens = 0  # ... so many tokens of it
        self.preemptions = 0
        self.prediction: Prediction | None = None
        self.prefilled_on = ""
        self.is_traced = is_traced
        self.interrupted = 0
        self.untold: list[wire.Interruption] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has its outcome."""
        return self.state is State.DONE


def wire_us(seconds: float) -> int:
    """Return microseconds for a message; batch work may run for longer than these can say."""
    return min(int(seconds * 1e6), _U32_MAX)


_NOBODY = Gateway(0)  # until a request is submitted


class Slot:
    """One sequence on one replica: a request's dispatch, from submit to the engine's last word.

    A slot outlives its request when that was cancelled or preempted: the engine still holds the
    sequence until it reports the end.

    Attributes:
        charge: Virtual service of the tenant per output token.
        prefill_owed: Prompt tokens that the engine has not computed, by the router's books.
        cached_tokens: Predicted at dispatch, then what the engine says.
        output_booked: Output tokens that KV blocks are booked for.
        emitted: Tokens told by the engine.
        first_at: When the first token was told; 0.0 before.
        credit_s: Of its replica, at the first token; see `router.core.fleet.engine_model`.
        is_open: Somebody still wants its tokens.
        is_placed: The gateway was told where it runs.
        is_prefill: It ends with its first token, and the answer goes on elsewhere.
        decision: What was known when it was placed, of some.
        known: What is kept of that for all others: predicted cost and time until the first token,
            and how many requests waited.
    """

    __slots__ = (
        *("request", "gateway", "handle", "tenant", "charge", "replica_id", "sequence"),
        *("prompt_tokens", "prefill_owed", "cached_tokens", "output_booked", "output_max"),
        *(
            "kv_blocks",
            "dispatched_at",
            "emitted",
            "first_at",
            "credit_s",
            "is_admitted",
            "is_open",
        ),
        *("output", "is_placed", "decision", "known", "is_prefill"),
    )

    def __init__(
        self, request: Request, tenant: "Tenant", replica_id: str, *, sequence: int, now: float
    ) -> None:
        self.request = request
        self.gateway = request.gateway
        self.handle = request.handle
        self.tenant = tenant
        self.charge = 2.0 / tenant.weight
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
        self.credit_s = 0.0
        self.is_admitted = False
        self.is_open = True
        self.is_placed = False
        self.is_prefill = False
        self.decision: wire.Explanation | None = None
        self.known: tuple[float, float, int] | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV blocks that one replica is to hand to another.

    Attributes:
        slot: Booked on the target, and not sent there before the transfer has ended.
        source: Replica that has them.
        first: Index of the first one among the prompt's blocks.
        blocks: How many.
        deadline_s: For all of it; then the target computes them itself.
    """

    slot: Slot
    source: str
    first: int
    blocks: int
    deadline_s: float


class Actions:
    """What the shell has to do now.

    Attributes:
        batches: Per gateway key.
        dispatches: Sequences to send, per replica.
        cancels: Sequences to cancel, per replica; may name those of `dispatches`.
        probes: Replicas that are to run a canary inference.
        transfers: To be started; each is answered by `on_transferred`.
    """

    __slots__ = ("batches", "cancels", "dispatches", "probes", "transfers")

    def __init__(self) -> None:
        self.batches: list[tuple[int, Batch]] = []
        self.dispatches: dict[str, list[Slot]] = {}
        self.cancels: dict[str, list[int]] = {}
        self.probes: list[str] = []
        self.transfers: list[Transfer] = []


@dataclass(slots=True)
class Stats:
    """Running totals and samples since the shell last took them; for metrics only."""

    outcomes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    ttft_s: list[float] = field(default_factory=list[float])
    queue_s: list[float] = field(default_factory=list[float])
    ttft_predicted_s: float = 0.0  # sum over the requests in `ttft_s`
    tokens: int = 0
    prompt_tokens: int = 0  # placed
    cached_tokens: int = 0  # of these, found in a cache
    requeues: int = 0
    preemptions: int = 0
    ejections: dict[str, int] = field(default_factory=dict[str, int])  # by reason
    transfers: dict[str, int] = field(default_factory=dict[str, int])  # by result
    stray_tokens: int = 0  # of sequences the books do not know
    count_mismatches: int = 0  # engine and router disagree on a sequence's tokens
