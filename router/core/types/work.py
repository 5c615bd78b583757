"""A cell's report of its demand, and of its replicas' speed."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class TierWork:
    """The work of one tier; sums since the cell's book was made.

    Attributes:
        requests: Requests that came.
        prompt_tokens: Prompt tokens to compute, as predicted when the requests came.
        output_tokens: Output tokens, as expected when the requests came.
        refused: Requests among them for which there was no room.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The speed of one replica with as many sequences as it can serve within its objective.

    Attributes:
        prompt_token_s: Seconds per computed prompt token.
        output_token_s: Seconds per output token.
        sequences: Number of sequences at once.
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
        epoch: Epoch of the cell's book; a later book has a greater one.
        number: Number of this report in the epoch.
        tiers: Sums by priority of the tier.
        queued: Waiting (requests, prompt tokens to compute), by priority of the tier.
        running: Sequences on replicas.
        replicas_ready: Replicas that are attached and not draining.
        speed: Median speed of the replicas that have measured enough; None: none has.
        first_token_s: TTFT of a usual request on an idle replica; 0: not known.
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
