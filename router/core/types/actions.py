"""The output of the core for its shell: actions, and figures for metrics."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.core.types.request import Dispatch

if TYPE_CHECKING:
    from router.core.types.batch import GatewayBatch


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV blocks that one replica is to hand to another.

    Attributes:
        dispatch: Dispatch booked on the target; the shell sends it there after the transfer.
        source: Replica that has the blocks.
        first: Index of the first block among those of the prompt.
        blocks: Number of blocks.
        deadline_s: Seconds for the whole transfer; later the target computes the blocks itself.
    """

    dispatch: Dispatch
    source: str
    first: int
    blocks: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class EjectionNotice:
    """An ejection of a replica for its answers.

    Attributes:
        replica_id: Id of the replica.
        cell_id: Id of the replica's cell.
        wrong: Wrongly answered canaries, of those that count.
        asked: Canaries that count.
    """

    replica_id: str
    cell_id: str
    wrong: int
    asked: int


class Actions:
    """The actions for the shell after a tick.

    Attributes:
        batches: Messages, with the key of their gateway.
        dispatches: Sequences to send, by replica.
        cancels: Sequences to cancel, by replica; may name some of `dispatches`.
        probes: Replicas that are to run a canary inference.
        transfers: Transfers to start; the shell answers each by `RouterCore.on_transferred`.
        accusations: Ejections to report to the quality guard.
    """

    __slots__ = ("accusations", "batches", "cancels", "dispatches", "probes", "transfers")

    def __init__(self) -> None:
        self.batches: list[tuple[int, GatewayBatch]] = []
        self.dispatches: dict[str, list[Dispatch]] = {}
        self.cancels: dict[str, list[int]] = {}
        self.probes: list[str] = []
        self.transfers: list[Transfer] = []
        self.accusations: list[EjectionNotice] = []


@dataclass(slots=True)
class Stats:
    """Totals and samples since the shell last took them; for metrics only.

    Attributes:
        outcomes: Ended requests, by kind and error code.
        ttft_s: Seconds until the first token, one per request.
        queue_times_s: Seconds from arrival to dispatch, one per placement.
        ttft_predicted_s: Sum of the predictions for the requests in `ttft_s`.
        tokens: Output tokens.
        prompt_tokens: Prompt tokens of placed requests.
        cached_tokens: Prompt tokens of placed requests that an engine found in its cache.
        ejections: Ejected replicas, by reason.
        transfers: Ended transfers, by result.
        stray_tokens: Tokens of sequences that the books do not know.
        count_mismatches: Sequences whose number of tokens the engine and the router disagree on.
    """

    outcomes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    ttft_s: list[float] = field(default_factory=list[float])
    queue_times_s: list[float] = field(default_factory=list[float])
    ttft_predicted_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requeues: int = 0
    preemptions: int = 0
    ejections: dict[str, int] = field(default_factory=dict[str, int])
    transfers: dict[str, int] = field(default_factory=dict[str, int])
    stray_tokens: int = 0
    count_mismatches: int = 0
