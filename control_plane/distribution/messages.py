"""Checks the reports of agents, and writes the answers to agents. Pure.

An agent is trusted for its own node only. Its reports are bounded here. False reports on chunks are
detected by the nodes that fetch these chunks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.distribution.model import (
    STORE,
    Failure,
    FetchPlan,
    NodePlace,
    NodeReport,
    Order,
    Priority,
    Trouble,
)
from control_plane.distribution.tickets import Tickets
from control_plane.distribution.wants import Wants
from control_plane.fields import is_digest, is_id
from sluice.addresses import is_address
from sluice.manifests import CHUNKS_MAX
from sluice.wire.distribution.v1 import distribution_pb2 as wire

HELD_MAX = 16_384  # largest number of artifacts in one report
_DIGESTS_MAX = 4096
_FAILURES_MAX = 4096
_BITMAP_BYTES_MAX = CHUNKS_MAX // 8
_PLACE_CHARACTERS_MAX = 128
# Largest number of cached serialized lists. One list has 700 KB for 10,000 adapters.
_WRITTEN_MAX = 16
_TROUBLES = {
    wire.TROUBLE_CORRUPT: Trouble.CORRUPT,
    wire.TROUBLE_TIMEOUT: Trouble.TIMEOUT,
    wire.TROUBLE_REFUSED: Trouble.REFUSED,
}
_PRIORITIES = {
    Priority.NEEDED: wire.PRIORITY_NEEDED,
    Priority.WARMING: wire.PRIORITY_WARMING,
    Priority.PREFETCH: wire.PRIORITY_PREFETCH,
}


class BadReportError(ValueError):
    """A report that no correct agent sends. The message names the mistake."""


@dataclass(frozen=True, slots=True)
class Said:
    """A checked report of an agent.

    Attributes:
        report: Report for the planner.
        peer_address: Address (host:port) at which the node serves chunks, or empty if it serves
            none.
        complete: Whether the node has all chunks of an artifact, by digest of the artifacts in the
            report.
        needed: Digests of artifacts that requests wait for.
        declined: Digests of artifacts for which the node has no room.
        knows_unchanged: Whether the agent understands an answer that omits an unchanged list.
    """

    report: NodeReport
    peer_address: str
    complete: Mapping[str, bool]
    needed: frozenset[str]
    declined: frozenset[str]
    knows_unchanged: bool = False


def read_report(message: wire.DistributionReport) -> Said:
    """Return the checked report. Raises BadReportError if the report is not valid."""
    _check(is_id(message.node_id) and message.node_id != STORE, "node_id")
    _check(is_id(message.boot_id), "boot_id")
    _check(0 < len(message.region) <= _PLACE_CHARACTERS_MAX, "region")
    _check(0 < len(message.rack) <= _PLACE_CHARACTERS_MAX, "rack")
    _check(not message.peer_address or is_address(message.peer_address), "peer_address")
    _check(len(message.held) <= HELD_MAX, "held")
    _check(len(message.failures) <= _FAILURES_MAX, "failures")
    held: dict[str, int] = {}
    complete: dict[str, bool] = {}
    for item in message.held:
        _check(is_digest(item.digest) and len(item.chunks) <= _BITMAP_BYTES_MAX, "held")
        held[item.digest] = int.from_bytes(item.chunks, "little")
        complete[item.digest] = item.is_complete
    report = NodeReport(
        node_id=message.node_id,
        place=NodePlace(message.region, message.rack),
        boot_id=message.boot_id,
        held=held,
        failures=tuple(_read_failure(failure) for failure in message.failures),
        is_full=message.is_full,
        serves=bool(message.peer_address),
    )
    return Said(
        report,
        message.peer_address,
        complete,
        _read_digests(message.needed, "needed"),
        _read_digests(message.declined, "declined"),
        message.knows_unchanged,
    )


def write_answer(
    answer: FetchPlan,
    node_id: str,
    addresses: Mapping[str, str],
    tickets: Tickets,
    now_unix_s: float,
) -> wire.DistributionAnswer:
    """Return a plan as a message for a node, without the list of wanted artifacts.

    Args:
        answer: Plan for the node. Orders whose source has no address are left out, because the
            source has disconnected.
        node_id: Node that receives the answer.
        addresses: Addresses at which nodes serve chunks, by node id.
        tickets: Writes the tickets that sources require.
        now_unix_s: Unix time in seconds.
    """
    keys = tickets.keys(node_id, now_unix_s)
    message = wire.DistributionAnswer(
        wants_full=answer.wants_full,
        peer_keys=[wire.PeerKey(id=number, key=key) for number, key in keys.items()],
    )
    for order in answer.orders:
        if order.source == STORE:
            message.orders.append(_write_order(order))
        elif order.source in addresses:
            ticket = tickets.write(order.digest, order.source, node_id, now_unix_s)
            message.orders.append(_write_order(order, addresses[order.source], ticket))
    return message


class WantedWriter:
    """Adds wanted artifacts to answers. A list that many nodes share is serialized once."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[Mapping[str, Priority], bytes]] = {}

    def add(
        self,
        answer: wire.DistributionAnswer,
        wants: Wants,
        told: Mapping[str, Priority] | None,
        *,
        knows_unchanged: bool,
    ) -> None:
        """Add to an answer the artifacts that its node should have.

        Args:
            answer: Answer, which is changed in place.
            wants: Artifacts that the node should have.
            told: Shared mapping of wants in the stream's last answer, or None before the first
                answer.
            knows_unchanged: Whether the agent understands an answer that omits an unchanged list.
        """
        if not knows_unchanged:
            answer.wanted.extend(_write_wanted(wants.flat()))
            return
        if told is wants.shared:
            answer.is_wanted_unchanged = True
        else:
            answer.MergeFromString(self._of(wants.shared))
        for digest, priority in sorted(wants.own.items()):
            number = wire.PRIORITY_UNSPECIFIED if priority is None else _PRIORITIES[priority]
            answer.own.add(digest=digest, priority=number)

    def _of(self, shared: Mapping[str, Priority]) -> bytes:
        if id(shared) not in self._written:
            while len(self._written) >= _WRITTEN_MAX:
                del self._written[next(iter(self._written))]  # the oldest entry, by dict order
            message = wire.DistributionAnswer(wanted=_write_wanted(shared))
            self._written[id(shared)] = shared, message.SerializeToString()
        return self._written[id(shared)][1]


def _write_wanted(wanted: Mapping[str, Priority]) -> list[wire.Wanted]:
    ordered = sorted(wanted, key=lambda digest: (wanted[digest], digest))
    return [wire.Wanted(digest=d, priority=_PRIORITIES[wanted[d]]) for d in ordered]


def merge(earlier: NodeReport, later: NodeReport) -> NodeReport:
    """Return one report that is equivalent to two consecutive reports of a node."""
    if earlier.boot_id != later.boot_id or later.is_full:
        return later
    return NodeReport(
        node_id=later.node_id,
        place=later.place,
        boot_id=later.boot_id,
        held={**earlier.held, **later.held},
        failures=(*earlier.failures, *later.failures),
        is_full=earlier.is_full,
        serves=later.serves,
    )


def new_orders(before: Sequence[Order], after: Sequence[Order]) -> tuple[int, int]:
    """Return the number of new orders from peers, and the number from the store."""
    fresh = set(after) - set(before)
    of_store = sum(order.source == STORE for order in fresh)
    return len(fresh) - of_store, of_store


def _write_order(order: Order, address: str = "", ticket: str = "") -> wire.Order:
    return wire.Order(
        digest=order.digest,
        start=order.start,
        stop=order.stop,
        source_node_id="" if order.source == STORE else order.source,
        source_address=address,
        priority=_PRIORITIES[order.priority],
        ticket=ticket,
    )


def _read_failure(failure: wire.Failure) -> Failure:
    _check(is_digest(failure.digest) and failure.chunk < CHUNKS_MAX, "failures")
    _check(not failure.source_node_id or is_id(failure.source_node_id), "failures")
    # A kind of trouble that only a newer agent defines counts as a refusal.
    trouble = _TROUBLES.get(failure.trouble, Trouble.REFUSED)
    return Failure(failure.digest, failure.chunk, failure.source_node_id or STORE, trouble)


def _read_digests(digests: Iterable[str], name: str) -> frozenset[str]:
    found = frozenset(digests)
    _check(len(found) <= _DIGESTS_MAX and all(is_digest(digest) for digest in found), name)
    return found


def _check(holds: bool, name: str) -> None:
    if not holds:
        raise BadReportError(f"{name} of the report is malformed")
