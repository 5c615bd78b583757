"""The output of the core for its shell, that is, actions and figures for metrics."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.core.types.request import Dispatch

if TYPE_CHECKING:
    from router.core.types.batch import GatewayBatch


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of KV blocks from one replica to another.

    Attributes:
        dispatch: Dispatch recorded on the target replica, sent by the shell after the transfer.
        source: Replica that has the blocks.
        first: Index of the first block within the prompt.
        blocks: Number of blocks.
        deadline_s: Seconds for the whole transfer, after which the target computes the blocks.
    """

    dispatch: Dispatch
    source: str
    first: int
    blocks: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class EjectionNotice:
    """The ejection of a replica because of wrong answers.

    Attributes:
        replica_id: Id of the replica.
        cell_id: Id of the replica's cell.
        wrong: Number of wrongly answered canaries among `asked`.
        asked: Number of recent canaries behind the verdict.
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
        cancels: Sequences to cancel, by replica, some of which may be in `dispatches`.
        probes: Replicas that are to run a canary inference.
        transfers: Transfers to start, whose ends the shell reports by `RouterCore.on_transferred`.
        accusations: Ejections for wrong answers, to report to the control plane.
        is_sign_of_life: Whether every gateway gets a message, which shows that this router runs.
    """

    __slots__ = (
        "accusations",
        "batches",
        "cancels",
        "dispatches",
        "is_sign_of_life",
        "probes",
        "transfers",
    )

    def __init__(self) -> None:
        self.batches: list[tuple[int, GatewayBatch]] = []
        self.dispatches: dict[str, list[Dispatch]] = {}
        self.cancels: dict[str, list[int]] = {}
        self.probes: list[str] = []
        self.transfers: list[Transfer] = []
        self.accusations: list[EjectionNotice] = []
        self.is_sign_of_life = False


@dataclass(slots=True)
class Stats:
    """Totals and samples for metrics since the last call of `RouterCore.take_stats`.

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
        stray_tokens: Tokens of sequences that the router has no record of.
        count_mismatches: Sequences whose token count differs between the engine and the router.
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
