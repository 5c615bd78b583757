"""Nodes that actuators are asked for: never too few for what serves, never by a difference."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.actuators import Actuator, ActuatorsError, owners, read_actuators
from control_plane.scaling.asking import body_of
from control_plane.scaling.nodes import (
    AskOutcome,
    GroupNode,
    NodeGroup,
    NodesAsk,
    ask_warning,
    asked_nodes,
)

ENTRY = {"name": "gpu", "kind": "kubernetes", "nodes": "gpu-node", "nodes_max": 9}
HOOK = {
    "name": "cloud",
    "kind": "webhook",
    "nodes": "cloud",
    "nodes_max": 9,
    "url": "https://cloud.example/nodes",
    "secret": "s3cret",
}


def _nodes(*replicas: int, foreign: tuple[int, ...] = ()) -> tuple[GroupNode, ...]:
    return tuple(
        GroupNode(f"gpu-node-{at}", count, count if at in foreign else 0)
        for at, count in enumerate(replicas)
    )


def _group(wanted: int, per_node: int = 1, nodes: tuple[GroupNode, ...] = ()) -> NodeGroup:
    return NodeGroup(nodes, {"pool": (wanted, per_node)}, 0, 9, is_ordered=True)


def test_pools_share_nodes_within_the_bounds_of_the_actuator() -> None:
    two = NodeGroup((), {"one": (3, 4), "two": (1, 4)}, 0, 9)
    assert asked_nodes(two).wanted == 1
    assert asked_nodes(replace(two, replicas={"one": (3, 4), "two": (2, 4)})).wanted == 2
    assert asked_nodes(replace(two, nodes_min=3)).wanted == 3
    assert asked_nodes(_group(50)).wanted == 9
    assert asked_nodes(NodeGroup((), {"third": (3, 3)}, 0, 9)).wanted == 1


def test_a_stateful_set_grows_at_once_and_shrinks_as_its_highest_nodes_get_empty() -> None:
    ask = asked_nodes(_group(2, nodes=_nodes(1, 1, 1, 1)))
    assert ask.surplus == ("gpu-node-2", "gpu-node-3")
    assert ask.step(4) == 4
    assert asked_nodes(_group(2, nodes=_nodes(1, 1, 1, 0))).step(4) == 3
    assert asked_nodes(_group(2, nodes=_nodes(1, 1, 0, 0))).step(4) == 2
    assert asked_nodes(_group(6, nodes=_nodes(1, 1))).step(2) == 6


def test_replicas_of_a_lost_node_beyond_the_set_never_make_it_grow() -> None:
    nodes = (*_nodes(1, 1), GroupNode("gpu-node-7", 1, is_lost=True))
    ask = asked_nodes(_group(2, nodes=nodes))
    assert (ask.wanted, ask.step(2), ask.present) == (2, 2, 2)


def test_a_pool_outside_the_actuator_keeps_its_node_and_the_nodes_below() -> None:
    ask = asked_nodes(_group(1, nodes=_nodes(1, 0, 1, 0, foreign=(2,))))
    assert ask.surplus == ("gpu-node-3",)
    assert ask.step(4) == 3


def test_a_webhook_is_told_a_number_and_the_names_of_empty_nodes() -> None:
    nodes = tuple(
        GroupNode(f"cloud-{name}", count) for name, count in zip("abc", (1, 0, 2), strict=True)
    )
    ask = asked_nodes(NodeGroup(nodes, {"pool": (2, 1)}))
    assert ask.surplus == ask.empty == ("cloud-b",)
    told = body_of(Actuator.model_validate(HOOK), ask)
    assert told["nodes_wanted"] == 2
    assert told["nodes_to_end"] == ["cloud-b"]
    busy = tuple(replace(node, replicas=1) for node in nodes)
    ask = asked_nodes(NodeGroup(busy, {"pool": (2, 1)}))
    assert (len(ask.surplus), ask.empty) == (1, ())
    assert body_of(Actuator.model_validate(HOOK), ask)["nodes_wanted"] == 3


def test_a_node_that_was_chosen_stays_chosen() -> None:
    nodes = (GroupNode("cloud-a", 1), GroupNode("cloud-b", 2, is_surplus=True))
    assert asked_nodes(NodeGroup(nodes, {"pool": (1, 1)})).surplus == ("cloud-b",)


_GROUPS = st.builds(
    NodeGroup,
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans(), st.booleans()),
        max_size=10,
        unique_by=lambda it: it[0],
    ).map(
        lambda rows: tuple(
            GroupNode(f"n-{at}", count, count * is_foreign, is_lost=is_lost)
            for at, count, is_foreign, is_lost in rows
        )
    ),
    st.dictionaries(st.sampled_from("ab"), st.tuples(st.integers(0, 20), st.integers(1, 4))),
    st.just(0),
    st.integers(0, 12),
    st.booleans(),
)


@given(_GROUPS, st.integers(0, 15))
def test_no_step_takes_a_node_that_has_replicas(group: NodeGroup, found: int) -> None:
    ask = asked_nodes(group)
    number = ask.step(found)
    assert number <= max(found, ask.wanted)
    held = {node.id for node in group.nodes if node.replicas}
    foreign = {node.id for node in group.nodes if node.foreign}
    assert not held & set(ask.empty)
    assert not foreign & set(ask.surplus)
    if group.is_ordered and number < found:
        assert all(int(node_id[2:]) < number for node_id in held if int(node_id[2:]) < found)


def test_troubles_of_an_actuator_are_told() -> None:
    ask = NodesAsk(wanted=5, held=3, present=3)
    assert ask_warning("gpu", ask, AskOutcome("kept"), -1.0) == ""
    assert "quota" in ask_warning("gpu", ask, AskOutcome("changed"), 600.0)
    assert "2 of 5 nodes are 10 min late" in ask_warning("gpu", ask, AskOutcome("kept"), 600.0)
    assert ask_warning("gpu", ask, AskOutcome("failed", "status 403"), 0.0).endswith("status 403")
    twice = NodesAsk(wanted=2, held=2, present=4)
    assert "has brought 4 nodes, and 2 are" in ask_warning("gpu", twice, AskOutcome("kept"), 0.0)


def _file(tmp_path: Path, entries: object) -> Path:
    file = tmp_path / "actuators.json"
    file.write_text(json.dumps(entries))
    return file


def test_actuators_own_nodes_by_name(tmp_path: Path) -> None:
    near = HOOK | {"name": "near", "nodes": "cloud-near"}
    known = read_actuators(_file(tmp_path, [ENTRY, HOOK, near]))
    ids = ["gpu-node-0", "gpu-node-x", "gpu-node", "cloud-1", "cloud-near-1", "embed-node-0"]
    found = {"gpu-node-0": "gpu", "cloud-1": "cloud", "cloud-near-1": "near"}
    assert owners(ids, known) == found
    assert read_actuators(None) == {}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"name": "gpu"}, "want a list"),
        ([ENTRY | {"nodes_min": 10}], "nodes_min 10 is above nodes_max 9"),
        ([ENTRY | {"url": "http://api"}], "wants https"),
        ([HOOK | {"secret": ""}], "wants `secret`"),
        ([HOOK | {"url": "ftp://x"}], "url: a webhook wants"),
        ([ENTRY, ENTRY], "the same `name`"),
        ([ENTRY, ENTRY | {"name": "other"}], "the same `nodes`"),
        ([ENTRY | {"nodes": "GPU"}], "0.nodes"),
        ([HOOK | {"sekret": "s3cret"}], "0.sekret"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_no_secret(
    entries: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ActuatorsError) as caught:
        read_actuators(_file(tmp_path, entries))
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)
