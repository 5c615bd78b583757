"""The commands of the command line, each with its help and the module that defines it.

The modules of commands import clients, tables and certificates, which costs half a second of CPU.
So only the module of the requested command is imported. A test compares the helps here with the
helps in the modules.
"""

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

_GAP = 2  # columns between a name and its help
_MARGIN = 6  # columns that the frame of the help needs


class CommandEntry(NamedTuple):
    """A command of the first level of the command line.

    Attributes:
        place: Module and attribute of the command's function, or of its group of commands.
        help: First sentence of its help.
        is_remote: Whether the command calls an installation, here or on another machine.
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
        "Check this machine and the installation, and print each fault with its correction.",
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
        "usage_commands:usage", "Show usage by tenant, key and model: requests and tokens."
    ),
    "cost": CommandEntry(
        "cost_commands:cost",
        "Show the cost of the fleet by pool, model, tenant or hour, and when self-hosting pays.",
    ),
    "explain": CommandEntry(
        "explain:explain",
        "Explain the placement of a request, or of one that might come now.",
    ),
    "trace": CommandEntry(
        "trace_commands:trace",
        "Show the time of a request by stage, or the router's facts of a running request.",
    ),
    "top": CommandEntry(
        "top_commands:top", "Show pools, routers, tenants and models live, until q or Ctrl-C."
    ),
    "version": _local(
        "version_command:version",
        "Print the version, and the installed builds of the router's and the engine's cores.",
    ),
    "tools": CommandEntry("tool_commands:tools", "Tools that the gateway runs for models."),
    "tenants": CommandEntry(
        "tenant_commands:tenants", "Tenants, the parties that use the platform."
    ),
    "keys": CommandEntry("key_commands:keys", "API keys of a tenant."),
    "tiers": CommandEntry("tier_commands:tiers", "Priority classes and their limits."),
    "models": CommandEntry("model_commands:models", "Models, by public name."),
    "auto": CommandEntry("auto_commands:auto", "Candidates and policy of the model `auto`."),
    "adapters": CommandEntry(
        "adapter_commands:adapters", "Adapters across models, and their nodes."
    ),
    "artifacts": CommandEntry("artifact_commands:artifacts", "Bases and adapters, by digest."),
    "rollouts": CommandEntry("rollout_commands:rollouts", "Releases on their way to all requests."),
    "rollback": CommandEntry(
        "rollout_commands:roll_back",
        "Abort a model's rollout, or else serve its previous release again, at once.",
    ),
    "fleet": CommandEntry("fleet_commands:fleet", "Pools, cells, replicas, nodes and routers."),
    "scaling": CommandEntry(
        "scaling_commands:scaling", "The number of a pool's replicas, and its reasons."
    ),
    "golden": CommandEntry(
        "golden_commands:golden", "Golden prompts, which find replicas with wrong answers."
    ),
    "alerts": CommandEntry(
        "alert_commands:alerts", "Alerts, their acknowledgements, silences and receivers."
    ),
    "incidents": CommandEntry(
        "alert_commands:incidents", "Incidents, from the page to their report."
    ),
    "backup": _local(
        "backup_commands:backup",
        "Write tenants, keys, models, rollouts, audit and all artifacts into a directory.",
    ),
    "restore": _local(
        "backup_commands:restore",
        "Restore a backup while the platform serves, and keep the previous database.",
    ),
    "admin-keys": CommandEntry("admin_key_commands:admin_keys", "Keys of the admin REST."),
    "compose": _local("compose_commands:compose", "Settings and keys for docker-compose.yml."),
    "config": _local("config_commands:config", "Check the settings of services."),
    "certificates": _local("certificate_commands:certificates", "Certificates for mutual TLS."),
}


def load(name: str) -> Any:
    """Import the module of a command, and return the command as an object of click.

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
    """All commands by name, each of which is imported at its first use."""

    def __init__(self) -> None:
        """Create the mapping, in which no command is imported yet."""
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
        """Forget an imported command, so that its next use imports it again."""
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of the help."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a command of this name, without importing it."""
        return name in COMMANDS


class CommandGroup(TyperGroup):
    """The first level of the command line, whose help imports no command."""

    def __init__(self, **attributes: Any) -> None:
        """Use the list of commands instead of registered commands."""
        super().__init__(**attributes)
        self.commands = LoadedCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - overrides
        """Write the list of commands."""
        limit = formatter.width - _MARGIN - max(map(len, COMMANDS))
        rows = [(name, _shortened(entry.help, limit)) for name, entry in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows, col_spacing=_GAP)


def _shortened(text: str, limit: int) -> str:
    """Return as many words of a text as fit into `limit` characters."""
    if len(text) <= limit:
        return text
    words = text[: limit - len("...") + 1].rpartition(" ")[0]
    return f"{words}..."
