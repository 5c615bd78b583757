"""The list of commands: the help of each, and the module that defines it.

Modules of commands import clients, tables and certificates, which takes half a second of CPU. So
only the module of the command that runs is imported. A test compares the helps with the modules'.
"""

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

_GAP = 2  # columns between a name and its help
_MARGIN = 6  # columns that the help's frame takes


class CommandEntry(NamedTuple):
    """A command of the first level.

    Attributes:
        place: Module and attribute of its function, or of its group of commands.
        help: First sentence of its help.
        is_remote: Whether the command calls an installation, which may be on another machine.
    """

    place: str
    help: str
    is_remote: bool = True


def _local(place: str, help_: str) -> CommandEntry:
    return CommandEntry(place, help_, is_remote=False)


COMMANDS: dict[str, CommandEntry] = {
    "up": _local("stack_commands:up", "Start the platform on this machine."),
    "down": _local("stack_commands:down", "Stop the platform, leaving nothing."),
    "status": _local("stack_commands:status", "Show every process: pid, port, memory, health."),
    "doctor": CommandEntry(
        "doctor_commands:doctor",
        "Say what is wrong on this machine and with the installation, and what to do.",
    ),
    "logs": _local("stack_commands:logs", "Print the end of a process' log."),
    "audit": CommandEntry(
        "audit_commands:audit",
        "Show the latest writes and refusals of the admin REST, newest first.",
    ),
    "requests": CommandEntry(
        "request_commands:requests", "Show the latest requests, as the trace store has them."
    ),
    "usage": CommandEntry(
        "usage_commands:usage", "Show what was used, by tenant, key and model: requests and tokens."
    ),
    "cost": CommandEntry(
        "cost_commands:cost",
        "Show what the fleet costs, by pool, model, tenant or hour, and when self-hosting pays.",
    ),
    "explain": CommandEntry(
        "explain:explain",
        "Show why a request is where it is, or where one would go that came now.",
    ),
    "trace": CommandEntry(
        "trace_commands:trace",
        "Show where the time of a request went; of one that still runs, what its router knows.",
    ),
    "top": CommandEntry(
        "top_commands:top", "Show pools, routers, tenants and models live; q or Ctrl-C ends it."
    ),
    "version": _local(
        "version_command:version",
        "Print the version, and which build of the router's core is installed.",
    ),
    "tools": CommandEntry("tool_commands:tools", "Tools that the gateway runs for models."),
    "tenants": CommandEntry("tenant_commands:tenants", "Who may use the platform."),
    "keys": CommandEntry("key_commands:keys", "API keys of a tenant."),
    "tiers": CommandEntry("tier_commands:tiers", "Priority classes and their limits."),
    "models": CommandEntry("model_commands:models", "What can be asked for."),
    "auto": CommandEntry("auto_commands:auto", "What the model `auto` may choose from, and how."),
    "adapters": CommandEntry(
        "adapter_commands:adapters", "Adapters across models, and where they lie."
    ),
    "artifacts": CommandEntry("artifact_commands:artifacts", "Bases and adapters, by digest."),
    "rollouts": CommandEntry("rollout_commands:rollouts", "Releases on their way to all requests."),
    "rollback": CommandEntry(
        "rollout_commands:roll_back",
        "Take a model back: end its rollout, else serve the release before, at once.",
    ),
    "fleet": CommandEntry("fleet_commands:fleet", "Pools, cells, replicas, nodes and routers."),
    "scaling": CommandEntry("scaling_commands:scaling", "How many replicas pools have, and why."),
    "golden": CommandEntry(
        "golden_commands:golden", "Prompts that find replicas which answer wrong."
    ),
    "alerts": CommandEntry(
        "alert_commands:alerts", "What fires, who looks at it, and who was told."
    ),
    "incidents": CommandEntry("alert_commands:incidents", "What went wrong, from page to text."),
    "backup": _local(
        "backup_commands:backup",
        "Write tenants, keys, models, rollouts, audit and all artifacts into a directory.",
    ),
    "restore": _local(
        "backup_commands:restore",
        "Bring a backup back while the platform serves; what was written since is set aside.",
    ),
    "admin-keys": CommandEntry("admin_key_commands:admin_keys", "Who may use the admin REST."),
    "compose": _local("compose_commands:compose", "What docker-compose.yml needs besides Docker."),
    "config": _local("config_commands:config", "Check the settings of services."),
    "certificates": _local("certificate_commands:certificates", "Certificates for mutual TLS."),
}


def load(name: str) -> Any:
    """Import the module of a command and return the command, as the command line takes it.

    Raises:
        KeyError: There is no command of this name.
    """
    entry = COMMANDS[name]
    module, _, attribute = entry.place.partition(":")
    found = getattr(importlib.import_module(f"cli.{module}"), attribute)
    epilog = None
    if entry.is_remote:
        from cli.admin import WHERE

        epilog = WHERE
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, epilog=epilog)
    else:
        alone.command(name, epilog=epilog)(found)
    return typer.main.get_group(alone).commands[name]


class LoadedCommands(MutableMapping[str, Any]):
    """All commands by name, each imported at its first use."""

    def __init__(self) -> None:
        """Begin with nothing imported."""
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a command."""
        if name not in self._loaded:
            self._loaded[name] = load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        """Replace a command."""
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        """Drop an imported command."""
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of the help."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a command; imports nothing."""
        return name in COMMANDS


class CommandGroup(TyperGroup):
    """The first level of the command line; its help imports no command."""

    def __init__(self, **attributes: Any) -> None:
        """Take the list in place of registered commands."""
        super().__init__(**attributes)
        self.commands = LoadedCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - overrides
        """Write the list of commands."""
        limit = formatter.width - _MARGIN - max(map(len, COMMANDS))
        rows = [(name, _shortened(entry.help, limit)) for name, entry in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows, col_spacing=_GAP)


def _shortened(text: str, limit: int) -> str:
    """Return as many words of a text as fit."""
    if len(text) <= limit:
        return text
    words = text[: limit - len("...") + 1].rpartition(" ")[0]
    return f"{words}..."
