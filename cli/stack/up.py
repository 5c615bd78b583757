"""`sluice up`: starts the stack, waits for the first token, runs, and stops everything."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import IO

import structlog

from cli.api import ApiClient, ApiError
from cli.certificates import BUNDLE, settings_of
from cli.stack import embeddings, preflight
from cli.stack.base import import_base, push_base
from cli.stack.errors import StackError
from cli.stack.home import Home, Secrets, load_secrets, render_env, save_secrets, write_atomic
from cli.stack.ports import load_ports
from cli.stack.postgres import client_url
from cli.stack.progress import StartProgress
from cli.stack.seed import ShippedBase, first_token, seed, wait_answering
from cli.stack.services import (
    CONTROL,
    HOST,
    INTERNAL_PORTS,
    POSTGRES,
    ServicePlan,
    StackOptions,
    prepare_certificates,
)
from cli.stack.state import (
    DONE,
    DOWN,
    READY,
    STARTING,
    STOPPED,
    ProcessState,
    StackState,
    own_identity,
    write_state,
)
from cli.stack.supervisor import Supervisor, watch_signals
from cli.stack.teardown import end_leftovers
from replica.engine.artifact import ArtifactError
from sluice.identity import CertificateRole

log = structlog.get_logger(__name__)

_SEED_STEP, _TOKEN_STEP, _BASE_STEP = "seed", "first token", "base"
_EMBEDDINGS_STEP = "embeddings"
_START_TIMEOUT_S = 180.0
_PATIENCE_S = 20.0
_EMBEDDINGS_PATIENCE_S = 30.0  # seconds to wait after the first token
_KILLED_STATUS = 130
STOPPING, FAILED = "stopping", "failed"


class Stack:
    """A running stack with its supervisor, state file and progress."""

    def __init__(
        self,
        home: Home,
        options: StackOptions,
        secrets: Secrets,
        ports: dict[str, int],
        progress: StartProgress,
    ) -> None:
        self._home = home
        self._options = options
        self._secrets = secrets
        self._ports = ports
        self._progress = progress
        self._started_unix_s = time.time()
        self._phase = STARTING
        self._embeddings = embeddings.describe(is_wanted=options.has_embeddings)
        self._first_token_unix_s = 0.0
        self.waits_for = "some processes did not start; see: sluice status"
        self.logs = home.logs
        self.supervisor = Supervisor(
            ServicePlan(home, options, secrets, ports).services(), self._process_changed
        )
        self._save()

    def set_phase(self, phase: str) -> None:
        """Store the phase of the whole stack."""
        self._phase = phase
        log.info("stack_changed", phase=phase)
        self._save()

    async def bring_up(self, base: ShippedBase) -> None:
        """Seed the stack when the control plane answers. Then wait for a token and embeddings.

        Raises:
            StackError: The control plane refused a request.
        """
        await self.supervisor.ready[CONTROL].wait()
        async with ApiClient(self._options.admin_url, self._secrets.admin_key) as api:
            await self._seed(api, base)
            await self._wait_token()
            await self._push_base(api, base)
            # Embeddings are last, because another starting engine would delay the first token on
            # two cores.
            await self._wait_embeddings(api, await self._start_embeddings(api))

    async def _seed(self, api: ApiClient, base: ShippedBase) -> None:
        self._progress.update(_SEED_STEP, STARTING)
        try:
            await wait_answering(api, timeout_s=20.0)
            self._secrets = await seed(
                api,
                base,
                engine=self._options.engine,
                replicas=self._options.replicas,
                secrets=self._secrets,
            )
        except ApiError as error:
            raise StackError(f"the control plane could not be set up: {error}") from error
        save_secrets(self._home, self._secrets)
        self._write_env()
        self._progress.update(_SEED_STEP, DONE)

    async def _wait_token(self) -> None:
        for ready in self.supervisor.ready.values():
            await ready.wait()
        self._progress.update(_TOKEN_STEP, STARTING)
        url, key = self._options.base_url, self._secrets.demo_key
        await first_token(url, key, self._note_wait, verify=False)  # over loopback
        self._first_token_unix_s = time.time()
        self._progress.update(_TOKEN_STEP, DONE, f"from the {self._options.engine} engine")

    async def _push_base(self, api: ApiClient, base: ShippedBase) -> None:
        """Upload the base's files to the control plane, which checks adapters against them."""
        problem = await push_base(api, self._home.artifacts / base.digest)
        if problem:  # chat works already
            self._progress.say(f"no adapters can be published: {problem}")

    async def _start_embeddings(self, api: ApiClient) -> str:
        """Request a replica for embeddings. Returns its pool, or an empty string without one."""
        try:
            if self._embeddings == embeddings.SERVED:
                self._progress.update(_EMBEDDINGS_STEP, STARTING)
                return await embeddings.start(self._home, api)
            await embeddings.stop(api)
        except (ApiError, ArtifactError, OSError) as error:
            self._embeddings = f"off: {error}"
        self._progress.update(_EMBEDDINGS_STEP, STOPPED)
        self._progress.say(f"embeddings are {self._embeddings}")
        return ""

    async def _wait_embeddings(self, api: ApiClient, pool_id: str) -> None:
        """Wait at most `_EMBEDDINGS_PATIENCE_S` for the replica, because chat already works."""
        if pool_id:
            reason = await embeddings.wait_ready(api, pool_id, _EMBEDDINGS_PATIENCE_S)
            detail = f"{self._embeddings}: {reason[:100]}" if reason else self._embeddings
            self._progress.update(_EMBEDDINGS_STEP, DOWN if reason else DONE, detail)

    def _note_wait(self, reason: str) -> None:
        """Record why there is no token yet, and show the reason after 20 s."""
        self.waits_for = reason
        if time.time() - self._started_unix_s > _PATIENCE_S:
            self._progress.update(_TOKEN_STEP, STARTING, reason)

    def _write_env(self) -> None:
        values = {
            "OPENAI_BASE_URL": self._options.base_url,
            "OPENAI_API_KEY": self._secrets.demo_key,
            "SLUICE_ADMIN_URL": self._options.admin_url,
            "SLUICE_ADMIN_KEY": self._secrets.admin_key,
            "SLUICE_TELEMETRY_URL": (
                f"{self._options.scheme}://{HOST}:{self._ports['telemetry_http']}"
            ),
            "SLUICE_DATABASE_URL": client_url(self._home.root, self._ports[POSTGRES]),
            "SLUICE_ARTIFACT_STORE_URL": self._home.artifact_store.absolute().as_uri(),
        }
        if self._options.has_tls:
            values |= settings_of(self._home.certificates, CertificateRole.OPERATOR)
            values["SSL_CERT_FILE"] = str(self._home.certificates / BUNDLE)
        write_atomic(self._home.env_file, render_env(values), mode=0o600)

    def _process_changed(self, state: ProcessState) -> None:
        self._save()
        if self._phase == STARTING:
            detail = state.last_error[:100] if state.state == DOWN else _where(state)
            self._progress.update(state.name, state.state, detail)
        elif self._phase == READY and state.state == DOWN:
            self._progress.say(f"{state.name} is down and will be restarted: {state.last_error}")
        elif self._phase == READY and state.state == READY:
            self._progress.say(
                f"{state.name} is back (pid {state.pid}, start {state.restarts + 1})"
            )

    def _save(self) -> None:
        pid, ticks = own_identity()
        state = StackState(
            supervisor_pid=pid,
            supervisor_started=ticks,
            started_unix_s=self._started_unix_s,
            phase=self._phase,
            engine=self._options.engine,
            port=self._options.port,
            admin_port=self._options.admin_port,
            replicas=self._options.replicas,
            processes=tuple(self.supervisor.states.values()),
            embeddings=self._embeddings,
            first_token_unix_s=self._first_token_unix_s,
            has_tls=self._options.has_tls,
        )
        try:
            write_state(self._home, state)
        except OSError as error:  # a full disk must not stop the stack
            log.warning("state_not_written", error=str(error))


def _where(state: ProcessState) -> str:
    return f"{HOST}:{state.port}" if state.port and state.state == READY else ""


async def run_stack(
    home: Home,
    options: StackOptions,
    progress: StartProgress,
    when_ready: Callable[[], None],
) -> None:
    """Start the stack, run it until a stop is requested, and stop it.

    The caller has locked the home. `when_ready` is called once, after the first token.

    Raises:
        StackError: The stack did not start, and all its processes are stopped again.
    """
    base = _prepare(home, options, progress)
    if options.has_tls:
        prepare_certificates(home)
    secrets = load_secrets(home)
    public = (options.port, options.admin_port)
    start = int(home.marker[:8], 16)
    ports = load_ports(home.ports_file, INTERNAL_PORTS, start, public=public)
    stack = Stack(home, options, secrets, ports, progress)
    failure = ""
    try:
        async with _stop_signal(home) as stop, asyncio.TaskGroup() as group:
            stack.supervisor.start(group)
            failure = await _until_started(group, stack, base, stop)
            if not failure and stop.is_set():
                failure = "stopped before it served"
            if not failure:
                stack.set_phase(READY)
                when_ready()
                await stop.wait()
            progress.close_open_lines()
            progress.say("stopping")
            stack.set_phase(STOPPING)
            await stack.supervisor.stop()
    finally:
        end_leftovers(home)
        stack.set_phase(FAILED if failure else STOPPED)
    if failure:
        raise StackError(failure)
    progress.say("stopped; nothing is left running")


def _prepare(home: Home, options: StackOptions, progress: StartProgress) -> ShippedBase:
    """Check the machine, clean up after a killed earlier run, and import the base."""
    preflight.check_platform()
    preflight.check_home(home)
    ended = end_leftovers(home)
    if ended:
        progress.say(f"an earlier run was not ended properly; ended {', '.join(ended)}")
    preflight.check_public_ports(options.port, options.admin_port)
    preflight.check_triton(options.engine)
    progress.update(_BASE_STEP, STARTING)
    base = import_base(options.base, home.artifacts)
    progress.update(_BASE_STEP, DONE, base.digest[:12])
    return base


async def _until_started(
    group: asyncio.TaskGroup, stack: Stack, base: ShippedBase, stop: asyncio.Event
) -> str:
    """Wait for the first token, a failure or a stop request. Returns the failure, if any."""

    async def bring_up() -> str:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await stack.bring_up(base)
        except StackError as error:
            return str(error)
        except TimeoutError:
            return (
                f"no token came within {_START_TIMEOUT_S:.0f} s (last: {stack.waits_for}); see "
                f"{stack.logs}"
            )
        return ""

    async def failed() -> str:
        await stack.supervisor.failed.wait()
        return stack.supervisor.failure

    async def stopped() -> str:
        await stop.wait()
        return ""

    tasks = [group.create_task(wait()) for wait in (bring_up, failed, stopped)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ended = next(task for task in tasks if task.done())
    for task in tasks:
        task.cancel()
    return ended.result()


@asynccontextmanager
async def _stop_signal(home: Home) -> AsyncGenerator[asyncio.Event]:
    """Yield an event set by the first signal. A second signal kills all processes and this one."""
    stop = asyncio.Event()

    def kill() -> None:
        end_leftovers(home, grace_s=0)
        os._exit(_KILLED_STATUS)

    restore = watch_signals(asyncio.get_running_loop(), stop.set, kill)
    try:
        yield stop
    finally:
        restore()


def log_to_file(home: Home) -> IO[str]:
    """Write the supervisor's own log, as JSON lines, to logs/supervisor.log."""
    home.logs.mkdir(parents=True, exist_ok=True)
    file = home.log_file("supervisor").open("a", buffering=1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file),
    )
    return file
