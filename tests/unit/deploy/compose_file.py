"""docker-compose.yml as Compose reads it, as far as the tests need it: variables filled in."""

import re
from pathlib import Path
from typing import Any

import yaml

from cli.compose_env import completed

ROOT = Path(__file__).parents[3]
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")
PREFIXES = {
    "gateway": "GATEWAY__",
    "router": "ROUTER__",
    "replica.agent": "AGENT__",
    "control_plane": "CONTROL_PLANE__",
    "control_plane.migrate": "CONTROL_PLANE__",
    "telemetry": "TELEMETRY__",
    "telemetry.migrate": "TELEMETRY__",
}


def env_file() -> dict[str, str]:
    return completed({})


def filled(text: str, values: dict[str, str]) -> str:
    """Return the text with `${NAME}`, `${NAME:-default}` and `${NAME:?why}` replaced."""

    def one(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, kind, rest = found[1], found[2], found[3]
        if values.get(name):
            return values[name]
        assert kind == "-", f"{found[0]} is neither in .env nor has it a default"
        return rest

    return _VARIABLE.sub(one, text)


def services() -> dict[str, dict[str, Any]]:
    text = (ROOT / "docker-compose.yml").read_text()
    return yaml.load(filled(text, env_file()), yaml.CSafeLoader)["services"]


def is_ours(service: dict[str, Any]) -> bool:
    return service["image"].startswith("sluice")


def is_job(service: dict[str, Any]) -> bool:
    return service["restart"].startswith("on-failure")
