"""The first level of the command line: its help is true, and costs no import of a command."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.commands import COMMANDS, load

# What a command may import only when it runs; each takes 20 ms of processor or more.
HEAVY = {
    *("httpx", "aiohttp", "rich", "structlog", "cryptography", "pydantic_settings"),
    *("sqlalchemy", "asyncpg", "grpc", "psutil", "numpy", "cli.stack.services", "cli.stack.up"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_describes_commands_as_their_help_does(name: str) -> None:
    command = load(name)
    assert command.name == name
    assert command.get_short_help_str(1000) == COMMANDS[name].help
    assert bool(command.epilog) == COMMANDS[name].is_remote


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'httpx', 'pydantic', 'structlog', 'rich', 'cryptography'} & set(sys.modules)\n"
        "commands = {name for name in sys.modules if name.endswith('_commands')}\n"
        "sys.exit(str(heavy | commands) if heavy | commands else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_a_command_that_is_loaded_has_imported_nothing_heavy() -> None:
    """What draws, asks or encrypts is imported where it does: `--help` needs none of it."""
    code = (
        "import sys\n"
        "from cli.commands import COMMANDS, load\n"
        "for name in COMMANDS: load(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"cli.tenant_commands", "cli.top_commands", "cli.backup_commands"} <= loaded
    assert sorted(loaded & HEAVY) == []


def test_a_misspelled_command_is_told_its_neighbour() -> None:
    said = CliRunner().invoke(app, ["rollout"])
    assert said.exit_code == 2
    assert "'rollouts'" in said.output


def test_a_shell_completes_commands() -> None:
    runner = CliRunner()
    asked = {"_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": "sluice rol", "COMP_CWORD": "1"}
    said = runner.invoke(app, [], prog_name="sluice", env=asked)
    assert said.stdout.split() == ["rollouts", "rollback"]
