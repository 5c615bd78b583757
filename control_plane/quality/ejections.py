"""Ejections of replicas for wrong answers, which routers report to the quality guard. Pure.

A router ejects a replica before it reports the ejection. The guard then sends prompts to this
replica first. For this replica, one wrong golden answer suffices for a quarantine, instead of two
(`sluice.detector.record`). An ejection ends as `confirmed` if the replica is quarantined. It ends
as `cleared` if the replica has since answered each prompt of the platform correctly. After
`OPEN_MAX` an open ejection no longer counts as evidence.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from control_plane.fields import is_id
from sluice.detector.evidence import EvidenceKind
from sluice.detector.record import CLEAN, Record
from sluice.wire.control.v1 import control_pb2 as wire

MESSAGE_MAX = 64  # largest number of ejections per message
_COUNT_MAX = 1000
OPEN_MAX = timedelta(minutes=15)
CONFIRMED, CLEARED = "confirmed", "cleared"


@dataclass(frozen=True, slots=True)
class Ejection:
    """An ejection of a replica for wrong answers, with columns of the table `ejections`."""

    replica_id: str
    router_id: str
    cell_id: str
    epoch: int
    evidence: EvidenceKind
    wrong: int
    asked: int
    ejected_at_unix_ms: int

    @property
    def record(self) -> Record:
        """The router's finding as a record of the detector."""
        return CLEAN.found(self.evidence, self.wrong)

    def shown(self) -> dict[str, Any]:
        """Return the ejection as JSON, for the evidence of a quarantine."""
        return {
            "router": self.router_id,
            "cell": self.cell_id,
            "epoch": self.epoch,
            "evidence": str(self.evidence),
            "wrong": self.wrong,
            "asked": self.asked,
            "ejected_at_unix_ms": self.ejected_at_unix_ms,
        }


def ejections_of(request: wire.AccuseRequest) -> list[Ejection]:
    """Return the ejections in a router's report. Raises ValueError if the report is not valid."""
    if len(request.ejections) > MESSAGE_MAX or not is_id(request.router_id):
        raise ValueError(f"want the router's id, and at most {MESSAGE_MAX} ejections")
    return [_ejection(request.router_id, one) for one in request.ejections]


def _ejection(router_id: str, said: wire.Ejection) -> Ejection:
    is_named = is_id(said.replica_id) and is_id(said.cell_id)
    is_stored = max(said.epoch, said.ejected_at_unix_ms) < 1 << 63
    if not (is_named and is_stored and said.wrong <= said.asked <= _COUNT_MAX):
        raise ValueError("an ejection needs ids of replica and cell, and counts that make sense")
    return Ejection(
        said.replica_id,
        router_id,
        said.cell_id,
        said.epoch,
        EvidenceKind(said.evidence),  # raises ValueError for an unknown kind
        said.wrong,
        said.asked,
        said.ejected_at_unix_ms,
    )
