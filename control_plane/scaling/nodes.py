"""Decides the number of nodes to request from an actuator, and the nodes to release. Pure.

Agents start replicas on existing nodes. An actuator adds and removes nodes. Each request has the
absolute number of nodes, so that a repeated request does no harm. A node is released only when no
replica is left on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

NODES_MAX = 10_000  # largest number of nodes per actuator
# Tolerated rounding error. Without it, three thirds of a node might be rounded up to two nodes.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class GroupNode:
    """A node that an actuator has added.

    Attributes:
        replicas: Number of replicas on the node, in any state.
        foreign: Number of the node's replicas of pools that the actuator does not serve.
        is_lost: Whether the node's agent is silent.
        is_surplus: Whether an earlier round chose the node to be released.
    """

    id: str
    replicas: int
    foreign: int = 0
    is_lost: bool = False
    is_surplus: bool = False


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of one actuator, and the pools that the actuator serves.

    Attributes:
        nodes: Known nodes.
        replicas: Two numbers by pool. The first is the number of wanted replicas, including
            sleeping replicas. The second is the number of replicas that fit on one node.
        nodes_min: Least number of nodes.
        nodes_max: Greatest number of nodes.
        is_ordered: Whether nodes are numbered from 0 and the highest numbers are removed first, as
            in a StatefulSet. If false, a request names the nodes that may be removed.
    """

    nodes: Sequence[GroupNode]
    replicas: Mapping[str, tuple[int, int]]
    nodes_min: int = 0
    nodes_max: int = NODES_MAX
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class NodesAsk:
    """A request to an actuator for a number of nodes.

    Attributes:
        wanted: Number of nodes to have.
        held: Number of nodes that must remain until replicas have left the surplus nodes.
        present: Number of nodes with a live agent.
        surplus: Ids of nodes without new replicas, from which present replicas are moved.
        empty: Ids of surplus nodes without replicas.
    """

    wanted: int
    held: int
    present: int
    surplus: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    def step(self, found: int) -> int:
        """Return the number of nodes to set, for an actuator that has `found` nodes now.

        An increase is immediate. A decrease waits until surplus nodes are empty.
        """
        if found <= self.wanted:
            return self.wanted
        return min(found, max(self.wanted, self.held))

    @property
    def missing(self) -> int:
        """Number of wanted nodes without a live agent."""
        return max(0, self.wanted - self.present)


@dataclass(frozen=True, slots=True)
class AskOutcome:
    """The result of a request for nodes.

    Attributes:
        result: `kept` if nothing had to change, `changed`, or `failed`.
        text: The error, or a remark that another client wrote the number. Otherwise it is empty.
    """

    result: str
    text: str = ""


def ask_warning(name: str, ask: NodesAsk, outcome: AskOutcome, late_s: float) -> str:
    """Return the warning about an actuator, or an empty text.

    Args:
        name: Name of the actuator.
        ask: Last request to the actuator.
        outcome: Result of the last request.
        late_s: Seconds for which the actuator's nodes have been late.
    """
    if outcome.text:
        return f"actuator {name}: {outcome.text}"
    if late_s > 0:
        return (
            f"actuator {name} took the ask, and {ask.missing} of {ask.wanted} nodes are"
            f" {late_s / 60:.0f} min late: look for its quota, and for pods that are pending"
        )
    if ask.present > max(ask.wanted, ask.held):
        return f"actuator {name} has brought {ask.present} nodes, and {ask.wanted} are wanted"
    return ""


def asked_nodes(group: NodeGroup) -> NodesAsk:
    """Return the request for the actuator of a group."""
    taken = sum(count / per_node for count, per_node in group.replicas.values())
    needed = min(max(ceil(taken - _EPSILON), group.nodes_min), group.nodes_max)
    return (_ordered if group.is_ordered else _named)(group, needed)


def ordinal_of(node_id: str) -> int:
    """Return the ordinal number of a StatefulSet's pod."""
    return int(node_id.rpartition("-")[2])


def _ordered(group: NodeGroup, needed: int) -> NodesAsk:
    """Return the request that releases the highest-numbered nodes.

    A foreign replica keeps its node and all nodes with lower numbers.
    """
    wanted = max(needed, _end(node for node in group.nodes if node.foreign))
    surplus = sorted(
        (node for node in group.nodes if ordinal_of(node.id) >= wanted),
        key=lambda node: ordinal_of(node.id),
    )
    return NodesAsk(
        wanted,
        _end(node for node in group.nodes if node.replicas),
        sum(not node.is_lost for node in group.nodes),
        tuple(node.id for node in surplus),
        tuple(node.id for node in surplus if not node.replicas),
    )


def _end(nodes: Iterable[GroupNode]) -> int:
    """Return the number after the highest ordinal of the nodes, or 0 without nodes."""
    return max((ordinal_of(node.id) + 1 for node in nodes), default=0)


def _named(group: NodeGroup, needed: int) -> NodesAsk:
    """Return the request that releases the emptiest nodes without foreign replicas.

    Nodes that an earlier round chose are released first.
    """
    present = [node for node in group.nodes if not node.is_lost]
    wanted = max(needed, sum(node.foreign > 0 for node in present))
    free = sorted(
        (node for node in present if not node.foreign),
        key=lambda node: (not node.is_surplus, node.replicas, node.id),
    )
    surplus = free[: max(0, len(present) - wanted)]
    empty = [node for node in surplus if not node.replicas]
    return NodesAsk(
        wanted,
        len(present) - len(empty),
        len(present),
        tuple(node.id for node in surplus),
        tuple(node.id for node in empty),
    )
