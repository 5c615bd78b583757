"""Progress of bytes, on a terminal's stderr."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from cli.render import console


@contextmanager
def byte_bar(doing: str) -> Generator[Callable[[int, int], None]]:
    """Yield a function of (finished bytes, total bytes), which draws only on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    err = console(stderr=True)
    with Bars(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("")

        def on_done(done_bytes: int, all_bytes: int) -> None:
            progress.update(bar, completed=done_bytes, total=all_bytes)

        yield on_done
