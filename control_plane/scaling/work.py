"""Turns the sums in routers' reports into the demand of pools, and counts each sum once. Pure.

Work is measured in seconds of one replica. A computed prompt token and an output token are weighted
by their cost on a fully loaded replica of the same base, hardware and configuration.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.scaling.model import DECODE, PREFILL
from sluice.wire.control.v1 import control_pb2 as wire

CELLS_MAX = 10_000  # largest number of cells per report
TIERS_MAX = 64  # largest number of tiers per cell
_SUM_MAX = 1 << 53  # largest sum, because JSON numbers are exact up to this value
_TOKEN_MIN_S, _TOKEN_MAX_S = 1e-9, 10.0
_SPEED_SMOOTHING = 0.2

Sums = tuple[int, int, int, int]  # requests, prompt tokens, output tokens, refused requests
NO_SUMS: Sums = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PoolSpeed:
    """The speed of one replica that serves as many sequences as its objective permits.

    Attributes:
        prompt_token_s: Seconds per computed prompt token.
        output_token_s: Seconds per output token.
        sequences: Number of concurrent sequences.
    """

    prompt_token_s: float
    output_token_s: float
    sequences: int = 1

    def work_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the work, in seconds of one replica, of a number of tokens."""
        return prompt_tokens * self.prompt_token_s + output_tokens * self.output_token_s

    def of_role(self, role: str) -> "PoolSpeed":
        """Return the speed at which only the work of a role counts. An empty role does all work."""
        if role == PREFILL:
            return PoolSpeed(self.prompt_token_s, 0.0, self.sequences)
        if role == DECODE:
            return PoolSpeed(0.0, self.output_token_s, self.sequences)
        return self

    def learned(self, told: "PoolSpeed") -> "PoolSpeed":
        """Return the speed averaged with another measurement."""

        def mean(before: float, now: float) -> float:
            return before + _SPEED_SMOOTHING * (now - before)

        return PoolSpeed(
            mean(self.prompt_token_s, told.prompt_token_s),
            mean(self.output_token_s, told.output_token_s),
            max(1, round(mean(self.sequences, told.sequences))),
        )


@dataclass(frozen=True, slots=True)
class CellWork:
    """The last report of a cell's owner.

    Attributes:
        key: Id of the cell and of the router.
        epoch: Epoch of the router's record. The sums of a later epoch begin at 0.
        sums: Sums by priority of the tier.
        queued: Waiting requests and their prompt tokens, by priority of the tier.
        running: Number of sequences that run on replicas.
        speed: Speed of the cell's replicas, or None before the first measurement.
        first_token_s: TTFT in seconds of a usual request on an idle replica. Zero means unknown.
    """

    key: str
    epoch: int
    sums: Mapping[int, Sums]
    queued: Mapping[int, tuple[int, int]]
    running: int
    speed: PoolSpeed | None
    first_token_s: float


# epoch and sums counted so far, by `CellWork.key`
Seen = dict[str, tuple[int, dict[int, Sums]]]


def news(reports: Iterable[CellWork], seen: Seen | None) -> tuple[dict[int, Sums], Seen]:
    """Return the increase of the sums since the last round by tier, and the sums of this round.

    Args:
        reports: Last reports of all present and past owners of the pool's cells.
        seen: Sums of the last round, or None in the first round, which has no increase.
    """
    came: dict[int, Sums] = {}
    now_seen: Seen = {}
    for report in reports:
        now_seen[report.key] = (report.epoch, dict(report.sums))
        if seen is None:
            continue
        epoch, before = seen.get(report.key, (report.epoch, {}))
        for priority, sums in report.sums.items():
            counted = before.get(priority, NO_SUMS) if epoch == report.epoch else NO_SUMS
            more = (max(0, now - then) for now, then in zip(sums, counted, strict=True))
            total = zip(came.get(priority, NO_SUMS), more, strict=True)
            requests, prompt, output, refused = (one + other for one, other in total)
            came[priority] = (requests, prompt, output, refused)
    return came, now_seen


def checked(cell: wire.CellDemand) -> dict[str, Any]:
    """Return a cell's report in its stored form.

    Raises:
        ValueError: A number is out of bounds.
    """
    if len(cell.tiers) > TIERS_MAX:
        raise ValueError(f"cell {cell.cell_id} has {len(cell.tiers)} tiers, at most {TIERS_MAX}")
    found: dict[str, Any] = {"tiers": {}, "running": cell.running, "ready": cell.replicas_ready}
    for tier in cell.tiers:
        sums = (tier.requests, tier.prompt_tokens, tier.output_tokens, tier.refused)
        queued = (tier.queued, tier.queued_prompt_tokens)
        if max(*sums, *queued) > _SUM_MAX:
            raise ValueError(f"a sum of cell {cell.cell_id} is above {_SUM_MAX}")
        found["tiers"][str(tier.priority)] = [*sums, *queued]
    found["first_token_s"] = min(cell.first_token_us, 1 << 40) / 1e6
    if cell.HasField("speed"):
        speed = cell.speed
        seconds = [speed.prompt_token_us / 1e6, speed.output_token_us / 1e6]
        if not all(math.isfinite(it) and _TOKEN_MIN_S <= it <= _TOKEN_MAX_S for it in seconds):
            raise ValueError(f"the speed of cell {cell.cell_id} is none: {seconds} s per token")
        found["speed"] = [*seconds, max(1, speed.sequences)]
    return found


def restored(key: str, epoch: int, kept: Mapping[str, Any]) -> CellWork:
    """Return a report from the stored form that `checked` returns."""
    tiers = {int(priority): row for priority, row in kept["tiers"].items()}
    return CellWork(
        key,
        epoch,
        {priority: (row[0], row[1], row[2], row[3]) for priority, row in tiers.items()},
        {priority: (row[4], row[5]) for priority, row in tiers.items() if row[4]},
        kept["running"],
        PoolSpeed(*kept["speed"]) if "speed" in kept else None,
        kept["first_token_s"],
    )


def told_speed(reports: Iterable[CellWork]) -> PoolSpeed | None:
    """Return the mean of the speeds measured by cells, or None without a measurement."""
    found = [report.speed for report in reports if report.speed is not None]
    if not found:
        return None
    return PoolSpeed(
        math.fsum(it.prompt_token_s for it in found) / len(found),
        math.fsum(it.output_token_s for it in found) / len(found),
        max(1, round(sum(it.sequences for it in found) / len(found))),
    )
