"""What a process says to the environment that a manifest gives it: shared by all kinds of manifests."""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from unittest.mock import patch

import control_plane.settings
import telemetry.settings
from gateway.settings import GatewaySettings
from replica.agent.settings import AgentSettings
from router.settings import Settings as RouterSettings
from sluice.settings import ServiceSettings
from sluice.shared_secret import InstallationSettings

# By module, as in `python -m MODULE`.
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "replica.agent": AgentSettings,
    "control_plane": control_plane.settings.Settings,
    "control_plane.migrate": control_plane.settings.MigrateSettings,
    "telemetry": telemetry.settings.Settings,
    "telemetry.migrate": telemetry.settings.MigrateSettings,
}
# What other programs than ours read, and what only other variables are made of.
SHARED = "INSTALLATION__"
OTHERS = (SHARED, "AWS_", "SLUICE_", "POD_IP", "PYTHON")


def module_of(command: Sequence[str]) -> str:
    """Return which of our processes a command starts."""
    (module,) = [word for word in command if word in SETTINGS]
    return module


def read_settings(module: str, environment: Mapping[str, str]) -> ServiceSettings:
    """Return the settings as the process would read them; AssertionError with what it would say."""
    owner = SETTINGS[module]
    prefix = str(owner.model_config.get("env_prefix", ""))
    strange = [
        name for name in environment if not name.startswith(prefix) and not name.startswith(OTHERS)
    ]
    assert not strange, f"{module} reads none of {strange}"
    said = io.StringIO()
    with patch.dict(os.environ, environment, clear=True), redirect_stderr(said):
        try:
            if not module.endswith(".migrate"):
                InstallationSettings.from_environment()
            return owner.from_environment()
        except SystemExit as error:
            raise AssertionError(f"{module}: {said.getvalue()}") from error


def port_of(address: str) -> int:
    """Return the port of host:port."""
    return int(address.rpartition(":")[2])


def grace_s(settings: ServiceSettings) -> float:
    """Return how long the process may take to end after SIGTERM, by its settings."""
    if isinstance(settings, GatewaySettings):
        steps = settings.unready_s + settings.idle_grace_s + settings.drain_s + settings.flush_s
        return steps + (15 if settings.workers > 1 else 5)  # gateway/server/workers.py
    if isinstance(settings, RouterSettings):
        return settings.drain_s + 10  # three waits of 2 s, and goodbye: router/app.py
    if isinstance(settings, AgentSettings):
        return 30  # engines have 9 s: replica/agent/triton.py
    return 15
