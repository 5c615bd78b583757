"""Shows the progress of a start, with one line per process or step, its mark and its seconds.

A terminal's lines are redrawn in place. In logs and pipes, each change is one plain line. A start
in the background sends its changes as JSON lines to the process that waits for it.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cli.stack.state import DONE, DOWN, READY, STARTING, STOPPED, WAITING


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """The progress of one process or step.

    Attributes:
        seconds: Seconds from its start until it was ready, or 0 before.
        detail: Short text with the port, or with the reason of a failure.
    """

    name: str
    state: str = WAITING
    seconds: float = 0.0
    detail: str = ""


class Renderer(Protocol):
    """Shows lines. `close` ends the display and leaves the last state visible."""

    def show(self, line: ProgressLine) -> None:
        """Show a line, replacing the earlier line with its name."""
        ...

    def say(self, text: str) -> None:
        """Show a remark."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


class PlainRenderer:
    """A renderer with one line per change, for logs and pipes."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._seen: dict[str, str] = {}

    def show(self, line: ProgressLine) -> None:
        """Print only final states, because intermediate states are of no use in a log."""
        if line.state in (WAITING, STARTING, STOPPED) or self._seen.get(line.name) == line.state:
            return
        self._seen[line.name] = line.state
        mark = "!!" if line.state == DOWN else "ok"
        self.say(f"{mark}  {line.name:<14} {line.seconds:5.1f} s  {line.detail}".rstrip())

    def say(self, text: str) -> None:
        """Print a remark. A closed pipe or terminal is not an error."""
        with suppress(OSError, ValueError):
            self._out.write(text + "\n")
            self._out.flush()

    def close(self) -> None:
        """Do nothing, because nothing is drawn in place."""


class LiveRenderer:
    """A renderer that redraws all lines in place."""

    def __init__(self, console: Console) -> None:
        self._lines: dict[str, ProgressLine] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table)
        self._live.start()

    def show(self, line: ProgressLine) -> None:
        """Redraw all lines, after replacing the line of this name."""
        self._lines[line.name] = line

    def say(self, text: str) -> None:
        """Print a remark above the lines."""
        with suppress(OSError):
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the lines for the last time, and leave them visible."""
        with suppress(OSError):
            self._live.stop()

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for line in list(self._lines.values()):
            seconds = f"{line.seconds:5.1f} s" if line.seconds else ""
            detail = Text(line.detail, style="dim", no_wrap=True, overflow="ellipsis")
            table.add_row(self._mark(line), line.name, seconds, detail)
        return table

    def _mark(self, line: ProgressLine) -> RenderableType:
        if line.state in (READY, DONE):
            return Text("✓", style="green")
        if line.state == DOWN:
            return Text("✗", style="red")
        if line.state in (WAITING, STOPPED):
            return Text("·", style="dim")
        return self._spinners.setdefault(line.name, Spinner("dots"))


class PipeRenderer:
    """Sends JSON lines to the waiting foreground process, and nothing after its end."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", buffering=1)

    def show(self, line: ProgressLine) -> None:
        """Send a line to the foreground process."""
        self._send({"line": asdict(line)})

    def say(self, text: str) -> None:
        """Send a remark to the foreground process."""
        self._send({"say": text})

    def end(self, error: str = "") -> None:
        """Report the result of the start, and close."""
        self._send({"end": error})
        self.close()

    def close(self) -> None:
        """Close the pipe."""
        with suppress(OSError, ValueError):
            self._pipe.close()

    def _send(self, message: dict[str, object]) -> None:
        with suppress(OSError, ValueError):
            self._pipe.write(json.dumps(message) + "\n")


def replay(pipe: IO[str], renderer: Renderer) -> str | None:
    """Show the output of a `PipeRenderer` until its start has ended.

    Returns the error (empty if the start succeeded), or None if the sender ended without a result.
    """
    for text in pipe:
        message = json.loads(text)
        if "line" in message:
            renderer.show(ProgressLine(**message["line"]))
        elif "say" in message:
            renderer.say(message["say"])
        else:
            return str(message["end"])
    return None


def terminal_renderer(console: Console) -> Renderer:
    """Return the renderer for the console."""
    return LiveRenderer(console) if console.is_terminal else PlainRenderer(console.file)


class StartProgress:
    """Measures the time of each line and shows it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._began_s: dict[str, float] = {}
        self._lines: dict[str, ProgressLine] = {}

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Show the state of a process or step, with the seconds from `starting` to the end."""
        now_s = time.monotonic()
        before = self._lines.get(name)
        if state == STARTING and (before is None or before.state != STARTING):
            self._began_s[name] = now_s
        began_s = self._began_s.get(name, now_s)
        has_ended = state in (READY, DONE, DOWN)
        seconds = max(0.05, now_s - began_s) if has_ended else 0.0
        self._lines[name] = ProgressLine(name, state, seconds, detail)
        self.renderer.show(self._lines[name])

    def say(self, text: str) -> None:
        """Show a remark."""
        self.renderer.say(text)

    def close_open_lines(self) -> None:
        """Mark lines that are still starting as stopped, so that no spinner remains afterwards."""
        for line in list(self._lines.values()):
            if line.state in (STARTING, WAITING):
                self._lines[line.name] = replace(line, state=STOPPED)
                self.renderer.show(self._lines[line.name])
