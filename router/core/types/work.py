"""A cell's report of its demand, and of its replicas' speed."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class TierWork:
    """The work of one tier, as totals since the router began its record of the cell.

    Attributes:
        requests: Requests that arrived, refused requests included.
        prompt_tokens: Prompt tokens to compute, as predicted when the requests arrived.
        output_tokens: Output tokens, as expected when the requests arrived.
        refused: Arrived requests that were refused for lack of capacity.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The speed of one replica that runs as many sequences as its TPOT objective permits.

    Attributes:
        prompt_token_s: Seconds per computed prompt token.
        output_token_s: Seconds per output token.
        sequences: Number of concurrent sequences.
        steps: Number of measured steps.
    """

    prompt_token_s: float
    output_token_s: float
    sequences: int
    steps: int


@dataclass(frozen=True, slots=True)
class WorkReport:
    """The report of a cell's work to the control plane.

    Attributes:
        cell_id: Id of the cell.
        epoch: Epoch of the router's record of the cell. A later record has a greater epoch.
        number: Number of this report within the epoch.
        tiers: Sums by priority of the tier.
        queued: Waiting (requests, prompt tokens to compute), by priority of the tier.
        running: Sequences on replicas.
        replicas_ready: Replicas that are attached and not draining.
        speed: Median speed of the replicas with enough measurements, or None if there are none.
        first_token_s: TTFT of an average request on an idle replica, or 0 if unknown.
    """

    cell_id: str
    epoch: int
    number: int
    tiers: Mapping[int, TierWork]
    queued: Mapping[int, tuple[int, int]]
    running: int
    replicas_ready: int
    speed: EngineSpeed | None
    first_token_s: float
