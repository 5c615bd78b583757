"""`sluice top`: shows pools, routers, tenants and models, updated at intervals."""

import asyncio
import json
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cli.admin import AsJson, has_certificate, refuse_clear, setting, take_certificates
from cli.api import ApiClient, ApiError, trust
from cli.stack.home import Home
from cli.stack_commands import fail
from cli.top_scrape import Scrape, ScrapeChange
from cli.top_sources import (
    Pages,
    Prometheus,
    ScrapeError,
    ScrapeSource,
    ScrapeTarget,
    engine_targets,
    parse_targets,
)
from cli.top_view import View, build, lines

_HOST = "127.0.0.1"
_ADAPTER_DIGITS = 12  # digits of a digest, as in the engines' metrics
_NAMES_TIMEOUT_S = 3.0
# Switch to the terminal's alternate screen without a cursor, and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_LINE, _END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def top(
    *,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two updates.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, after one interval.")] = False,
    as_json: AsJson = False,
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL|POOL=URL", help="Pages to read, instead of the stack's (repeat)."
        ),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Or a Prometheus that scrapes all of them.")
    ] = None,
    window: Annotated[
        float, typer.Option(min=5, max=3600, help="With --prometheus: seconds to look back.")
    ] = 60.0,
) -> None:
    """Show pools, routers, tenants and models live, until q or Ctrl-C."""
    if metrics_url and prometheus:
        raise typer.BadParameter("choose one of --metrics-url and --prometheus")
    try:
        targets = parse_targets(metrics_url or [])
    except ValueError as error:
        raise fail(str(error), 2) from None
    show = _print_json if as_json else _print_text
    is_live = sys.stdin.isatty() and sys.stdout.isatty() and not once and not as_json

    async def run() -> None:
        # a Prometheus has no certificate of the platform's CA
        verify = True if prometheus else trust()
        import httpx

        async with httpx.AsyncClient(trust_env=False, verify=verify) as http:
            models: Mapping[str, str] = {}
            if prometheus:
                source: ScrapeSource = Prometheus(http, prometheus, window)
            elif targets:
                source = Pages(http, _TargetOptions(targets))
            else:
                stack = _Stack()
                models = await stack.models()
                source = Pages(http, stack)
            look = _Look(source, models)
            if is_live:
                await _live(look, interval)
            else:
                await _printed(look, interval, show, once=once)

    take_certificates()
    try:
        with suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(run())
    except ScrapeError as error:
        raise fail(str(error)) from None


class _TargetOptions:
    """Returns the targets that the command line names."""

    def __init__(self, targets: Sequence[ScrapeTarget]) -> None:
        self._targets = targets

    async def __call__(self) -> Sequence[ScrapeTarget]:
        return self._targets


class _Stack:
    """Returns the services and the present replicas of the stack in $SLUICE_HOME as targets."""

    def __init__(self) -> None:
        home = Home.find()
        self._admin = setting("SLUICE_ADMIN_URL")
        self._key = setting("SLUICE_ADMIN_KEY")
        refuse_clear("SLUICE_ADMIN_URL", self._admin)
        from cli.stack.ports import read_ports

        ports = read_ports(home.ports_file)
        if not ports.keys() >= {"gateway_ops", "router_http"}:
            raise fail(f"no stack in {home.root}: name pages with --metrics-url, or --prometheus")
        gateway, router = (f"{_HOST}:{ports[name]}" for name in ("gateway_ops", "router_http"))
        addresses = [gateway, urlsplit(self._admin).netloc, router]
        scheme = "https" if has_certificate() else "http"
        self._services = [ScrapeTarget(f"{scheme}://{address}/metrics") for address in addresses]

    async def __call__(self) -> Sequence[ScrapeTarget]:
        async with ApiClient(self._admin, self._key) as api:
            return [*self._services, *await engine_targets(api)]

    async def models(self) -> dict[str, str]:
        """Return the models' names by the digits of their adapters, empty if they are unknown."""
        try:
            async with asyncio.timeout(_NAMES_TIMEOUT_S), ApiClient(self._admin, self._key) as api:
                found = await api.list("/v1/models")
        except (ApiError, TimeoutError):
            return {}
        pairs = ((it["adapter_digest"] or "", it["id"]) for it in found)
        return {digest[:_ADAPTER_DIGITS]: name for digest, name in pairs if digest}


class _Look:
    """Computes a view of the metrics for each refresh of the screen."""

    def __init__(self, source: ScrapeSource, models: Mapping[str, str]) -> None:
        self._source = source
        self._models = models
        self._has_seen = False

    async def view(self) -> View:
        """Return the present view, or an empty view with the reason if no target answers.

        Raises:
            ScrapeError: No target has ever answered.
        """
        try:
            change = await self._source.change()
            self._has_seen = True
        except ScrapeError as error:
            if not self._has_seen:
                raise
            change = ScrapeChange(Scrape(0.0), Scrape(0.0, silent=(str(error),)))
        return build(change, self._models)


async def _printed(
    look: _Look, interval_s: float, show: Callable[[View, bool], None], *, once: bool
) -> None:
    view = await look.view()
    if not view.took_s:  # a single scrape has no rates
        await asyncio.sleep(interval_s)
        view = await look.view()
    show(view, once)
    while not once:
        await asyncio.sleep(interval_s)
        show(await look.view(), once)


def _print_json(view: View, once: bool) -> None:
    sys.stdout.write(json.dumps(view.as_json(), indent=2 if once else None) + "\n")
    sys.stdout.flush()


def _print_text(view: View, once: bool) -> None:
    width = shutil.get_terminal_size((240, 24)).columns if sys.stdout.isatty() else 240
    sys.stdout.write("\n".join(lines(view, width)) + ("\n" if once else "\n\n"))
    sys.stdout.flush()


async def _live(look: _Look, interval_s: float) -> None:
    """Draw until q is pressed. Raises ScrapeError if no target answers the first scrape."""
    ended = asyncio.Event()
    with _screen(), _keys(ended):
        while not ended.is_set():
            _draw(await look.view())
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), interval_s)


@contextmanager
def _screen() -> Generator[None]:
    """Use the alternate screen and read keys without Enter. The terminal is always restored."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _keys(ended: asyncio.Event) -> Generator[None]:
    """Set the event when q is pressed, or when the terminal is closed.

    Ctrl-C ends the task, even if the parent process ignores the signal.
    """
    task = asyncio.current_task()
    assert task is not None, "drawn by a task"
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        pressed = os.read(descriptor, 64)
        if not pressed or b"q" in pressed.lower():
            ended.set()

    loop.add_reader(descriptor, read)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_reader(descriptor)


def _draw(view: View) -> None:
    size = shutil.get_terminal_size()
    shown = list(lines(view, size.columns))[: max(1, size.lines - 1)]
    text = "".join(f"{line}{_END_LINE}\r\n" for line in shown)
    sys.stdout.write(_HOME + text + _END_SCREEN)
    sys.stdout.flush()
