"""The text of `sluice scaling explain`, and a help text for each command and option."""

from typing import Any

import typer.main
from typer.core import TyperGroup, TyperOption

from cli.scaling_commands import scaling, told

_FOUND: dict[str, Any] = {
    "decided_at": "2026-01-01T00:00:00Z",
    "wanted": 2,
    "ready": 2,
    "booting": 0,
    "asleep": 0,
    "sleepers": 0,
    "reasons": [{"replicas": 2, "text": "demand"}],
    "warnings": [],
    "speed": {},
    "tiers": {},
    "tiers_s": 15.0,
    "boot_s": 300.0,
}


def test_an_explanation_counts_the_sleepers_of_a_pool_that_has_some() -> None:
    assert told(_FOUND)[0] == "2 replicas (2 ready, 0 booting):"
    sleepy = told(_FOUND | {"asleep": 1, "sleepers": 2})
    assert sleepy[0] == "2 replicas (2 ready, 0 booting, 1 of 2 asleep):"


def test_an_explanation_names_the_nodes_that_fetch_the_base_ahead() -> None:
    nodes = told(_FOUND | {"next_nodes": ["n1", "n2"]})
    assert nodes[-1] == "The next replicas boot on n1, n2, which fetch the base ahead."
    assert told(_FOUND | {"next_nodes": []}) == told(_FOUND)


def test_each_command_of_scaling_is_there_and_explains_its_options() -> None:
    group = typer.main.get_command(scaling)
    assert isinstance(group, TyperGroup)
    named = {"status", "explain", "plan", "pause", "pin", "resume", "history", "replay"}
    assert named <= group.commands.keys()
    for command in group.commands.values():
        assert command.help, command.name
        options = [it for it in command.params if isinstance(it, TyperOption)]
        assert all(it.help for it in options), command.name
