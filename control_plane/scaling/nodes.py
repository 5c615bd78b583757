"""Decides how many nodes an actuator is asked for, and which ones are given back; pure.

Agents start replicas on the nodes that there are. An actuator brings nodes and takes them away; it
is told a number of them, never a difference, so an ask that comes twice does no harm. A node is
given back only when no replica is left on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

NODES_MAX = 10_000  # of an actuator
_EPSILON = 1e-9  # three thirds of a node are one


@dataclass(frozen=True, slots=True)
class GroupNode:
    """A node that an actuator has brought.

    Attributes:
        replicas: Replicas on it, whatever their state.
        foreign: Replicas of pools that the actuator does not serve.
        is_lost: Whether its agent is silent.
        is_surplus: Whether an earlier look chose it to be given back.
    """

    id: str
    replicas: int
    foreign: int = 0
    is_lost: bool = False
    is_surplus: bool = False


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of one actuator, and the pools that it serves.

    Attributes:
        nodes: Nodes that are known.
        replicas: Wanted replicas, with sleepers, and how many fit on a node, by pool.
        nodes_min: Nodes at least.
        nodes_max: Nodes at most.
        is_ordered: Whether nodes are numbered from 0 and the highest go first (a StatefulSet); else
            the actuator is told which ones go.
    """

    nodes: Sequence[GroupNode]
    replicas: Mapping[str, tuple[int, int]]
    nodes_min: int = 0
    nodes_max: int = NODES_MAX
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class NodesAsk:
    """The nodes that an actuator is asked for.

    Attributes:
        wanted: Nodes that there shall be.
        held: Nodes that there must be until replicas have left them.
        present: Nodes whose agents are heard.
        surplus: Nodes that get no new replica, and lose those that they have.
        empty: Surplus nodes without replicas.
    """

    wanted: int
    held: int
    present: int
    surplus: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    def step(self, found: int) -> int:
        """Return the number to set where `found` is set: up at once, down as nodes get empty."""
        if found <= self.wanted:
            return self.wanted
        return min(found, max(self.wanted, self.held))

    @property
    def missing(self) -> int:
        """Nodes that are wanted and not heard."""
        return max(0, self.wanted - self.present)


@dataclass(frozen=True, slots=True)
class AskOutcome:
    """The result of an ask.

    Attributes:
        result: `kept` if nothing was to be changed, `changed`, or `failed`.
        text: Text for people: the error, or that something else writes; empty: nothing to say.
    """

    result: str
    text: str = ""


def ask_warning(name: str, ask: NodesAsk, outcome: AskOutcome, late_s: float) -> str:
    """Return the trouble that an actuator has; empty: none.

    Args:
        name: Name of the actuator.
        ask: The last ask.
        outcome: Its result.
        late_s: For how long its nodes have been late.
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
    """Return what to ask an actuator for."""
    taken = sum(count / per_node for count, per_node in group.replicas.values())
    needed = min(max(ceil(taken - _EPSILON), group.nodes_min), group.nodes_max)
    return (_ordered if group.is_ordered else _named)(group, needed)


def ordinal_of(node_id: str) -> int:
    """Return the number of a StatefulSet's pod."""
    return int(node_id.rpartition("-")[2])


def _ordered(group: NodeGroup, needed: int) -> NodesAsk:
    """Give back the highest numbers; a foreign replica keeps all nodes up to its own."""
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
    """Return how many nodes there are up to the last of these."""
    return max((ordinal_of(node.id) + 1 for node in nodes), default=0)


def _named(group: NodeGroup, needed: int) -> NodesAsk:
    """Give back the emptiest nodes without foreign replicas; one that was chosen stays chosen."""
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
