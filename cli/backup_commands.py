"""`sluice backup` and `sluice restore`: the control plane's database and all artifacts' bytes."""

from pathlib import Path
from typing import Annotated

import typer

from cli.admin import setting
from cli.bars import byte_bar
from cli.render import size_text
from cli.stack_commands import fail
from sluice.errors import PlatformError

Database = Annotated[
    str | None,
    typer.Option(help="URL of PostgreSQL; default: SLUICE_DATABASE_URL, else the running stack's."),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="file:///directory or s3://bucket/prefix; default: SLUICE_ARTIFACT_STORE_URL, else"
        " the running stack's."
    ),
]


def backup(
    directory: Annotated[
        Path, typer.Argument(file_okay=False, help="Directory of the backup; created if missing.")
    ],
    *,
    database: Database = None,
    store: Store = None,
) -> None:
    """Write tenants, keys, models, rollouts, audit and all artifacts into a directory.

    A second backup into the same directory copies only new chunks. Usage and traces are in the
    trace store, which this backup leaves out. Protect the directory, which has secrets.
    """
    import asyncio

    from cli.backups import BackupError, back_up

    urls = _urls(database, store)
    try:
        with byte_bar("artifacts") as on_done:
            made = asyncio.run(back_up(*urls, directory, on_done))
    except (BackupError, PlatformError) as error:
        raise fail(str(error)) from None
    typer.echo(f"{directory}: database, {made.chunks} chunks ({size_text(made.size_bytes)})")
    if made.lost:
        raise fail(
            f"the store has lost {len(made.lost)} chunks ({made.lost[0]}, ...): upload their"
            " artifacts again, then back up again"
        )


def restore(
    directory: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Directory that `sluice backup` wrote."),
    ],
    *,
    database: Database = None,
    store: Store = None,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Restore a backup while the platform serves, and keep the previous database.

    The previous database stays on the server under another name, with all later writes.
    """
    import asyncio

    from cli.backups import BackupError, read_backup
    from cli.backups import restore as bring_back

    urls = _urls(database, store)
    try:
        known = read_backup(directory)
        if not is_sure:
            typer.confirm(f"Restore {known.made_at}? Later writes are set aside", abort=True)
        with byte_bar("artifacts") as on_done:
            kept = asyncio.run(bring_back(directory, *urls, on_done))
    except (BackupError, PlatformError) as error:
        raise fail(str(error)) from None
    typer.echo(
        f"restored to {known.made_at}; the old database is now {kept}: drop it when all is well"
    )


def _urls(database: str | None, store: str | None) -> tuple[str, str]:
    return (
        database or setting("SLUICE_DATABASE_URL"),
        store or setting("SLUICE_ARTIFACT_STORE_URL"),
    )
