"""`sluice up`, `down`, `status` and `logs`: commands for the local stack."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from cli.builds import core_builds
from cli.render import console, curl_line, show_json, started_table, status_json, status_table
from cli.stack.errors import StackError
from cli.stack.home import Home, load_secrets, read_env, try_lock
from cli.stack.state import READY, StackState, is_supervised, read_state, start_ticks
from sluice.engines import ENGINES, OPENVINO, names

if TYPE_CHECKING:
    from cli.stack.progress import Renderer
    from cli.stack.services import StackOptions

_INTERRUPTED = 130
_STOP_TIMEOUT_S = 90.0  # seconds, the sum of the grace times of all layers


_LOCAL_ENGINES = names(lambda engine: engine.is_local)


def _local_engine(value: str) -> str:
    """Raise BadParameter for an engine that a local stack does not run."""
    if value not in _LOCAL_ENGINES:
        raise typer.BadParameter(f"{value!r}: choose {' or '.join(_LOCAL_ENGINES)}")
    return value


EngineOption = Annotated[
    str,
    typer.Option(
        metavar=f"[{'|'.join(_LOCAL_ENGINES)}]",
        callback=_local_engine,
        help=" ".join(f"{name}: {ENGINES[name].summary}." for name in _LOCAL_ENGINES),
    ),
]


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print one line on stderr and return the exit to raise."""
    typer.echo(f"sluice: {message}", err=True)
    return typer.Exit(code)


def _endpoint(value: str) -> str:
    """Raise BadParameter for a URL that telemetry would refuse."""
    if value and re.fullmatch(r"https?://[^/\s]+/\S*", value) is None:
        raise typer.BadParameter(f"{value} is no http(s)://HOST:PORT/PATH; collectors: /v1/traces")
    return value


_Endpoint = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=_endpoint,
        help="Send spans of requests there by OTLP over HTTP, as http://HOST:4318/v1/traces.",
    ),
]


def up(
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return as soon as the stack serves.")
    ] = False,
    engine: EngineOption = OPENVINO.name,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI API.")] = 8000,
    admin_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the admin REST.")
    ] = 8001,
    replicas: Annotated[
        int, typer.Option(min=1, max=16, help="Triton servers; each takes 300 to 500 MiB.")
    ] = 1,
    base: Annotated[
        Path | None,
        typer.Option(help="Serve another base than the shipped one: a Hugging Face directory."),
    ] = None,
    embeddings: Annotated[
        bool,
        typer.Option(help="Also serve the embedding model, if installed; takes 300 MiB."),
    ] = True,
    otlp_endpoint: _Endpoint = "",
    tls: Annotated[
        bool, typer.Option(help="Mutual TLS between all processes, with certificates of its own.")
    ] = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start the platform on this machine.

    Prints the addresses and a working request. The platform runs until Ctrl-C, or with --detach
    until `sluice down`. A second Ctrl-C kills all processes at once. Data, keys and ports remain
    in $SLUICE_HOME for the next start.
    """
    home = Home.find()
    arguments = [
        f"--engine={engine}",
        f"--port={port}",
        f"--admin-port={admin_port}",
        f"--replicas={replicas}",
        *([f"--base={base.expanduser().resolve()}"] if base else []),
        *([] if embeddings else ["--no-embeddings"]),
        *([f"--otlp-endpoint={otlp_endpoint}"] if otlp_endpoint else []),
        *(["--tls"] if tls else []),
    ]
    if detach:
        _start_in_background(home, arguments)
    else:
        from cli.stack.services import StackOptions

        options = StackOptions(
            engine, port, admin_port, replicas, base, embeddings, otlp_endpoint, tls
        )
        _run_here(home, options, ready_fd)


def _run_here(home: Home, options: "StackOptions", ready_fd: int) -> None:
    """Run the supervisor. `ready_fd` is a pipe to a waiting parent process, or -1."""
    import asyncio

    from cli.stack.progress import PipeRenderer, PlainRenderer, StartProgress, terminal_renderer
    from cli.stack.up import log_to_file, run_stack

    pipe = PipeRenderer(ready_fd) if ready_fd >= 0 else None
    renderer: Renderer = pipe or terminal_renderer(console())
    began_unix_s = time.time() - _age_s()
    progress = StartProgress(renderer)

    def when_ready() -> None:
        if pipe:
            pipe.end()
            return
        renderer.close()
        progress.renderer = PlainRenderer(sys.stdout)
        print_summary(home, began_unix_s)
        progress.say("Ctrl-C stops it.")

    error = ""
    try:
        with _lock(home), log_to_file(home):
            asyncio.run(run_stack(home, options, progress, when_ready))
    except (StackError, OSError) as problem:
        error = str(problem)
    except KeyboardInterrupt:
        error = "interrupted"
    renderer.close() if not pipe else pipe.end(error)
    if error:
        raise fail(error)


def _lock(home: Home) -> IO[str]:
    """Acquire and return the lock of the home directory.

    Raises:
        StackError: Another supervisor holds the lock, or the folder cannot be used.
    """
    from cli.stack.preflight import check_home

    check_home(home)
    lock = try_lock(home)
    if lock is None:
        state = read_state(home)
        where = f" on port {state.port}" if state else ""
        raise StackError(
            f"already running{where} in {home.root}: see `sluice status` or stop it: `sluice down`"
        )
    return lock


def _start_in_background(home: Home, arguments: list[str]) -> None:
    """Run `sluice up` in its own session, show its progress, and return when it serves."""
    from cli.stack.preflight import check_home
    from cli.stack.progress import replay, terminal_renderer

    began_unix_s = time.time() - _age_s()
    try:
        check_home(home)
        home.logs.mkdir(parents=True, exist_ok=True)
    except (StackError, OSError) as problem:
        raise fail(str(problem)) from None
    log_file = home.log_file("supervisor")
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "cli", "up", *arguments, f"--ready-fd={writing}"]
    with log_file.open("ab") as log:
        child = subprocess.Popen(
            command,
            pass_fds=(writing,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "SLUICE_HOME": str(home.root)},
        )
    os.close(writing)
    renderer = terminal_renderer(console())
    try:
        with os.fdopen(reading) as pipe:
            error = replay(pipe, renderer)
    except KeyboardInterrupt:
        renderer.close()
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise typer.Exit(_INTERRUPTED) from None
    renderer.close()
    if error is None:
        error = f"the supervisor ended with status {child.wait()}; see {log_file}"
    if error:
        raise fail(error)
    print_summary(home, began_unix_s)


def print_summary(home: Home, began_unix_s: float) -> None:
    """Print the addresses and a working request."""
    from cli.stack.health import build_rows
    from cli.stack.seed import MODEL

    state = read_state(home)
    if state is None:
        return
    env = read_env(home)
    out = console()
    out.print(started_table(build_rows(state, {}, {})))
    seconds = state.first_token_unix_s - began_unix_s
    out.print(f"First token after {seconds:.1f} s. Keys and addresses: {home.env_file}", end="\n\n")
    line = curl_line(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], MODEL)
    trusted = env.get("SSL_CERT_FILE")
    typer.echo(line.replace("curl", f"curl --cacert {trusted}", 1) if trusted else line)
    typer.echo()


def _age_s() -> float:
    """Return the seconds for which this process has been running."""
    ticks = start_ticks(os.getpid())
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def down() -> None:
    """Stop the platform, leaving nothing.

    The command also ends processes that an earlier, broken run left. Data stay in $SLUICE_HOME.
    """
    from cli.stack.teardown import end_leftovers

    home = Home.find()
    state = read_state(home)
    ended: list[str] = []
    if state and is_supervised(state):
        typer.echo(f"stopping {', '.join(_running(state))}")
        _stop_supervisor(state)
        ended = [*_running(state), f"supervisor ({state.supervisor_pid})"]
    leftovers = end_leftovers(home)
    if leftovers:
        typer.echo(f"ended what was left: {', '.join(leftovers)}")
    typer.echo("down" if ended or leftovers else f"nothing runs in {home.root}")


def _running(state: StackState) -> list[str]:
    return [f"{p.name} ({p.pid})" for p in state.processes if p.pid]


def _stop_supervisor(state: StackState) -> None:
    """Signal the supervisor to stop the stack, and kill the supervisor after a time-out."""
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while is_supervised(state) and time.monotonic() < deadline:
        time.sleep(0.05)
    if is_supervised(state):
        typer.echo(f"the supervisor did not end within {_STOP_TIMEOUT_S:.0f} s and was killed")
        os.kill(state.supervisor_pid, signal.SIGKILL)


def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show every process: pid, port, memory, health. Exit status 1 unless all are healthy."""
    home = Home.find()
    state = read_state(home)
    if state is None or not is_supervised(state):
        if as_json:
            show_json({"phase": "down", "is_healthy": False, "processes": []})
            raise typer.Exit(1)
        from cli.stack.teardown import leftovers

        orphans = len(leftovers(home))
        if orphans:
            raise fail(
                f"the supervisor in {home.root} is gone and {orphans} of its processes still run: "
                "`sluice down` ends them, `sluice up` does so and starts anew"
            )
        raise fail(f"nothing runs in {home.root}; start it with: sluice up")
    import asyncio

    from cli.stack.health import collect
    from cli.stack.ports import read_ports
    from cli.stack.services import ServicePlan, StackOptions, use_certificates
    from cli.stack.teardown import leftovers

    secrets = load_secrets(home)
    options = StackOptions(
        state.engine, state.port, state.admin_port, state.replicas, has_tls=state.has_tls
    )
    if state.has_tls:
        use_certificates(home)
    services = ServicePlan(home, options, secrets, read_ports(home.ports_file)).services()
    rows = asyncio.run(collect(state, services, options.admin_url, secrets.admin_key))
    if as_json:
        builds = {core.replace(" ", "_"): build for core, build in core_builds().items()}
        more = {"embeddings": state.embeddings, **builds}
        show_json(status_json(rows, state.phase, state.engine) | more)
    else:
        console().print(status_table(rows))
        typer.echo(f"embeddings: {state.embeddings}")
        for core, build in core_builds().items():
            typer.echo(f"{core}: {build}")
    if state.phase != READY or not all(row.is_healthy for row in rows):
        raise typer.Exit(1)


def logs(
    name: Annotated[str, typer.Argument(help="Name of a process as `sluice status` shows it.")],
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="From the end.")] = 50,
) -> None:
    """Print the end of a process' log."""
    from cli.stack.logfiles import find_log, follow_file, last_lines, log_names

    home = Home.find()
    file = find_log(home, name)
    if file is None:
        names = ", ".join(log_names(home)) or "none yet"
        raise fail(f"no log of {name!r} in {home.root}; there are: {names}")
    for line in last_lines(file, lines):
        typer.echo(line)
    if follow:
        with suppress(KeyboardInterrupt):
            for text in follow_file(file):
                typer.echo(text, nl=False)
