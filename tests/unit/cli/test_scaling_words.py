"""The text of `sluice scaling explain`, and a help text for each command and option."""

from typing import Any

import typer.main
from typer.core import TyperGroup, TyperOption

from cli.scaling_commands import scaling
from cli.scaling_words import told

_FOUND: dict[str, Any] = {
    "pool_id": "chat",
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
    "boots": 0,
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


def test_an_explanation_names_the_author_the_end_and_the_command_of_a_pin() -> None:
    hand = {"pin": 3, "pinned_by": "ann", "pin_until": "2026-01-01T02:00:00+00:00"}
    line = (
        "Set to 3 by hand (ann) until 2026-01-01T02:00 UTC: `sluice scaling resume chat` lifts it."
    )
    assert line in told(_FOUND | hand)
    assert line.replace(" until 2026-01-01T02:00 UTC", "") in told(
        _FOUND | hand | {"pin_until": None}
    )
    (paused,) = set(told(_FOUND | {"is_paused": True})) - set(told(_FOUND))
    assert "resume chat" in paused
    (off,) = set(told(_FOUND | {"is_on": False})) - set(told(_FOUND))
    assert "not applied" in off


def test_an_explanation_of_a_pool_without_a_plan_has_no_numbers() -> None:
    (line,) = told(_FOUND | {"decided_at": None, "wanted": 0, "reasons": []})
    assert "no plan yet" in line


def test_an_explanation_says_whether_the_boot_time_is_measured() -> None:
    assert told(_FOUND)[-1] == "A replica boots within 300 s (assumed, none measured)."
    assert told(_FOUND | {"boots": 4})[-1] == "A replica boots within 300 s (4 boots measured)."
