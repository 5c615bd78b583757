"""Engines of compose and of clusters answer nobody without the secret, as they are rendered."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replica.agent import triton
from replica.agent.triton import Ports
from sluice import shared_secret
from sluice.shared_secret import CHARACTERS_MIN, VARIABLE, SharedSecret, listed
from tests.unit.deploy import manifests
from tests.unit.deploy.compose_file import PREFIXES, is_job, services
from tests.unit.deploy.manifests import (
    NEEDS_KUSTOMIZE,
    OVERLAYS,
    container,
    environment,
    overlay,
    workloads,
)
from tests.unit.deploy.processes import module_of

IMAGES = Path(__file__).parents[3] / "deploy" / "images"
GROUPS = frozenset(
    {
        *("health", "metadata", "inference", "shared-memory", "model-config", "model-repository"),
        *("statistics", "trace", "logging"),
    }
)
# What opens a platform; each is for a while, or for other nodes than these.
LOOSE = {("INSTALLATION__IS_REQUIRED", "false"), ("AGENT__HIDES_SECRETS", "false")}


def openings_of(options: Iterable[str]) -> list[str]:
    """Return what of a Triton with these options a stranger reaches."""
    given = dict(it.split("=", 1) for it in options if it.startswith("--") and "=" in it)
    groups, _, rule = given.get("--grpc-restricted-protocol", "").partition(":")
    found = sorted(GROUPS - set(groups.split(",")))
    name, _, value = rule.partition("=")
    if not (name and value):
        found.append("no secret")
    if given.get("--allow-http") != "false":
        found.append("HTTP")
    if given.get("--metrics-address") != "127.0.0.1":
        found.append("metrics")
    return found


def in_compose() -> list[tuple[str, dict[str, str]]]:
    """Return the environment of each of our processes in compose."""
    return [
        (name, service["environment"])
        for name, service in services().items()
        if service.get("command", [""])[0] in PREFIXES and not is_job(service)
    ]


def check(found: list[tuple[str, dict[str, str]]]) -> str:
    """Check the environments of a deployment; return the secret that all of them share."""
    assert found
    shared = {values.get(VARIABLE, "") for _, values in found}
    assert len(shared) == 1, "processes with another secret do not understand each other"
    (secret,) = shared
    assert all(len(one) >= CHARACTERS_MIN for one in listed(secret))
    for name, values in found:
        assert not {(k, v.lower()) for k, v in values.items()} & LOOSE, name
    return secret


def options_with(secret: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how an agent with this secret starts Triton."""
    monkeypatch.setattr(shared_secret._Ours, "secret", SharedSecret(listed(secret)))
    found = SimpleNamespace(triton=Path("/opt"))
    command = triton._command(
        cast("Any", found), Path("/home"), "llm", "r", "10.0.0.1", Ports(1, 2)
    )
    return [*command, triton._access_option()]


def test_compose_renders_engines_closed_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert openings_of(options_with(check(in_compose()), monkeypatch)) == []


@NEEDS_KUSTOMIZE
@pytest.mark.parametrize("name", OVERLAYS)
def test_manifests_render_engines_closed_to_strangers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "secrets", cache(manifests.secrets))  # else new ones each time
    objects = overlay(name)
    found = [
        (module_of(container(it)["command"]), environment(it, objects)) for it in workloads(objects)
    ]
    ours = [(module, values) for module, values in found if not module.endswith(".migrate")]
    assert {module for module, _ in ours} >= {"router", "replica.agent", "gateway"}
    assert openings_of(options_with(check(ours), monkeypatch)) == []


def test_an_engine_image_alone_is_closed_to_strangers() -> None:
    text = (IMAGES / "engine.Dockerfile").read_text().replace("\\\n", " ")
    (entry,) = re.findall(r"exec tritonserver ([^\"]+)\"", text)
    started, count = re.subn(r"\$\{ENGINE_ACCESS:\?[^}]*\}", "NAME=VALUE", entry)
    assert count == 1, "without a secret it does not start"
    assert openings_of(started.split()) == []
    others = [it for it in IMAGES.glob("*.Dockerfile") if it.name != "engine.Dockerfile"]
    assert not [it for it in others if "exec tritonserver" in it.read_text()]


@pytest.mark.parametrize(
    ("old", "new", "opening"),
    [
        ("inference,", "", "inference"),
        ("model-repository,", "", "model-repository"),
        ("--grpc-restricted-protocol", "--x", "no secret"),
        ("--allow-http=false", "--allow-http=true", "HTTP"),
        ("--metrics-address=127.0.0.1", "--metrics-address=0.0.0.0", "metrics"),
    ],
)
def test_a_planted_opening_is_found(
    old: str, new: str, opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_with("s" * CHARACTERS_MIN, monkeypatch)
    assert opening in openings_of(option.replace(old, new, 1) for option in options)


@pytest.mark.parametrize(
    "planted",
    [
        {VARIABLE: "t" * CHARACTERS_MIN},
        {VARIABLE: ""},
        *({name: text} for name, text in sorted(LOOSE)),
    ],
    ids=str,
)
def test_a_planted_setting_is_found(planted: dict[str, str]) -> None:
    found = in_compose()
    check(found)
    name, values = found[-1]
    with pytest.raises(AssertionError):
        check([*found[:-1], (name, values | planted)])
