"""`sluice config`: checks or prints the settings of services, also before a start."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.stack.home import parse_env
from cli.stack_commands import fail

if TYPE_CHECKING:
    from sluice.settings import ServiceSettings

_WRONG = 2

config = typer.Typer(no_args_is_help=True, help="Check the settings of services.")
Services = Annotated[
    list[str] | None,
    typer.Argument(
        help="gateway, router, agent, control-plane, telemetry, certificates, kafka; none: any set."
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(help="KEY=VALUE lines to check instead of this environment."),
]


@config.command("check")
def check(services: Services = None, *, env_file: EnvFile = None) -> None:
    """Report unknown, missing and wrong settings, each with its correction.

    Exit status 2 means that there is such a setting. Values are never printed.
    """
    wrong = False
    with _environment(env_file):
        for name, owner in _chosen(services).items():
            _, problems = owner.check()
            wrong = wrong or bool(problems)
            for line in problems:
                typer.echo(f"{name}: {line}{_meaning(owner, line)}")
            if not problems:
                typer.echo(f"{name}: ok, {len(_given(owner))} set")
    if wrong:
        raise typer.Exit(_WRONG)


@config.command("show")
def show(services: Services = None, *, env_file: EnvFile = None) -> None:
    """Print the settings of services, including defaults, with asterisks for secrets."""
    with _environment(env_file):
        for name, owner in _chosen(services).items():
            settings, problems = owner.check()
            if settings is None or problems:
                raise fail(f"{name}: {problems[0]}", _WRONG)
            given = _given(owner)
            for field in owner.model_fields:
                value = getattr(settings, field)
                variable = _variable(owner, field)
                note = "" if variable in given else "  # default"
                typer.echo(f"{variable}={'' if value is None else value}{note}")


def _chosen(services: list[str] | None) -> "dict[str, type[ServiceSettings]]":
    from cli.settings_table import SETTINGS

    known = {name.replace(" ", "-"): owner for name, owner in SETTINGS.items()}
    unknown = [name for name in services or [] if name not in known]
    if unknown:
        raise fail(f"no service {unknown[0]!r}; choose from: {', '.join(known)}", _WRONG)
    found = {
        name: owner
        for name, owner in known.items()
        if (name in services if services else _given(owner))
    }
    if not found:
        prefixes = ", ".join(_variable(owner, "") for owner in known.values())
        raise fail(f"nothing to check: no name begins with one of {prefixes}", _WRONG)
    return found


def _variable(owner: "type[ServiceSettings]", field: str) -> str:
    return f"{owner.model_config.get('env_prefix', '')}{field}".upper()


def _given(owner: "type[ServiceSettings]") -> set[str]:
    prefix = _variable(owner, "")
    return {name.upper() for name in os.environ if name.upper().startswith(prefix)}


def _meaning(owner: "type[ServiceSettings]", problem: str) -> str:
    """Return type and meaning of the setting that a problem names, or an empty string."""
    from cli.settings_table import accepted, descriptions

    prefix = _variable(owner, "")
    field = problem.partition(":")[0].removeprefix(prefix).lower()
    if field not in owner.model_fields:
        return ""
    return f" ({accepted(owner.model_fields[field])}: {descriptions(owner)[field]})"


@contextmanager
def _environment(file: Path | None) -> Generator[None]:
    """Replace the environment by the variables of the file, if there is a file."""
    if file is None:
        yield
        return
    try:
        values = parse_env(file.read_text())
    except OSError as error:
        raise fail(f"{file} cannot be read: {error.strerror}", _WRONG) from None
    before: Mapping[str, str] = dict(os.environ)
    os.environ.clear()
    os.environ.update({name: value.strip("'\"") for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
