"""Composes the node agent from its parts, and runs it."""

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path

import structlog
from prometheus_client import generate_latest

from replica.agent.adoption import find_leftovers
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.local_api import LocalApi, OnlyHere
from replica.agent.artifacts.node import ArtifactCache, NodeOptions
from replica.agent.artifacts.suspects import SuspectReader
from replica.agent.control import ControlLink, DesiredFile
from replica.agent.engine_metrics import engine_metrics
from replica.agent.engine_user import engine_user
from replica.agent.fleet import NodeReplicas
from replica.agent.golden import GoldenAsker, askable
from replica.agent.hardware import HardwareReader
from replica.agent.hardware_watch import CordonFile, HardwareWatch
from replica.agent.metrics import AgentMetrics
from replica.agent.model_kinds import Canaries, Canary
from replica.agent.node import node_facts
from replica.agent.nvml import NvmlReader
from replica.agent.replica_state import EnginePatience
from replica.agent.runner import Leftover
from replica.agent.settings import AgentSettings
from replica.agent.trials import AdapterTrials
from replica.agent.triton import TritonLauncher
from sluice.addresses import host_and_port
from sluice.lifecycle import run_every
from sluice.status_http import status_server
from sluice.wire.agent.v1 import agent_pb2 as agent

log = structlog.get_logger(__name__)

_MEASURE_EVERY_S = 5.0
_LIBRARY_EVERY_S = 30.0
_BASES_EVERY_S = 0.5


class StateDirectoryInUseError(RuntimeError):
    """Another agent is using the state directory."""


def no_hardware() -> HardwareReader | None:
    """Return None, which means a node without accelerators or without their driver."""
    return None


class Agent:
    """Owns the Triton processes of a node, from their start to their end."""

    def __init__(
        self,
        settings: AgentSettings,
        launcher: TritonLauncher,
        prober: Canary | None = None,
        open_hardware: Callable[[], HardwareReader | None] = no_hardware,
    ) -> None:
        """Build the agent's parts, and start none of them.

        Args:
            settings: Settings of the node.
            launcher: Launcher that starts engines.
            prober: Prober of engines, or None to probe by a real inference.
            open_hardware: Function that returns a reader of accelerators. It is called in a thread.
        """
        self._settings = settings
        self._launcher = launcher
        self._canaries = Canaries()
        self._prober = prober or self._canaries
        self._facts = node_facts(settings.engine_names)
        self._metrics = AgentMetrics()
        self._open_hardware = open_hardware
        self._watch = HardwareWatch(
            CordonFile(settings.state_dir), self._note_cordons, self._metrics.set_hardware
        )
        self._desired_file = DesiredFile(settings.state_dir / "desired.json")
        self._link = ControlLink(settings.control_address, self._observe, self._on_desired)
        self._golden = GoldenAsker(
            lambda: askable(self._fleet.runners.values()) if self._fleet else [], self._metrics
        )
        self._trials = AdapterTrials(
            lambda: askable(self._fleet.runners.values()) if self._fleet else [],
            self._link.note_change,
        )
        self._library = Library(
            settings.artifacts_dir,
            max_bytes=settings.artifacts_max_bytes,
            reserve_bytes=settings.artifacts_reserve_bytes,
        )
        self._artifacts = _artifacts(settings, self._library)
        fetcher = self._artifacts or OnlyHere()
        self._local = LocalApi(settings.state_dir, self._library, fetcher, uid=launcher.uid)
        self._fleet: NodeReplicas | None = None
        self._suspects = SuspectReader(self._library, self._restart)
        self._knows_desired = False
        self._is_stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, and then stop or leave all engines, as configured.

        Engines that an earlier agent left are adopted. If this method raises, the engines continue,
        because a fault of the agent is no reason to stop them.

        Raises:
            StateDirectoryInUseError: Another agent runs with the same state directory.
            OSError: The HTTP address is in use, or the state directory cannot be written.
        """
        settings = self._settings
        with _exclusive(settings.state_dir):
            async with status_server(
                settings.http_address,
                is_ready=lambda: not self._why_not_ready(),
                metrics=lambda: generate_latest(self._metrics.registry),
                why_not_ready=self._why_not_ready,
                page=self._engine_page,
            ):
                try:
                    await self._serve(stop, await find_leftovers(self._launcher))
                finally:
                    await self._canaries.close()
                    if self._is_stopping and settings.on_stop == "stop":
                        await self._launcher.remove_leftovers()

    async def _serve(self, stop: asyncio.Event, leftovers: Mapping[str, Leftover]) -> None:
        await self._library.scan()
        async with self._local.serve(), asyncio.TaskGroup() as group:
            fleet = self._fleet = NodeReplicas(
                group,
                self._launcher,
                self._prober,
                limits_of(self._settings),
                on_change=self._note_change,
                observer=self._metrics,
                why_cordoned=self._watch.why_cordoned,
                problem_of=self._library.problem_of,
                why_waiting=self._why_waiting,
            )
            fleet.adopt(leftovers)
            if (desired := self._desired_file.load()) is not None:
                log.info("desired_state_loaded", replicas=len(desired.replicas))
                self._knows_desired = True
                self._apply(fleet, desired)
            tasks = [
                group.create_task(self._report()),
                group.create_task(self._measure()),
                group.create_task(self._keep_library()),
                group.create_task(self._fetch()),
                group.create_task(self._suspects.run()),
                group.create_task(self._watch.run(self._open_hardware)),
                group.create_task(self._golden.run()),
                group.create_task(self._trials.run()),
            ]
            await stop.wait()
            on_stop = self._settings.on_stop
            log.info("agent_stopping", replicas=len(fleet.runners), engines=on_stop)
            self._is_stopping = True
            await (fleet.stop() if on_stop == "stop" else fleet.leave())
            for task in tasks:
                task.cancel()
        await self._library.save_heat()

    async def _report(self) -> None:
        """Connect to the control plane once the health of adopted engines is known.

        An earlier report would list an adopted engine as starting, and routers would disconnect
        from it.
        """
        assert self._fleet is not None
        await self._fleet.settled()
        await self._link.run()

    async def _engine_page(self, path: str) -> bytes | None:
        """Return an engine's metrics for `/engines/REPLICA/metrics`, or None if unknown."""
        parts = path.split("/")
        if self._fleet is None or len(parts) != 4 or (parts[1], parts[3]) != ("engines", "metrics"):
            return None
        runner = self._fleet.runners.get(parts[2])
        launch = runner.launch if runner is not None else None
        return None if launch is None else await engine_metrics(launch.ports.metrics)

    async def _measure(self) -> None:
        async def step() -> None:
            assert self._fleet is not None
            await self._fleet.measure()
            self._update_metrics()

        await run_every(
            _MEASURE_EVERY_S, step, name="measure", expected=(OSError,), step_timeout_s=5.0
        )

    def _on_desired(self, desired: agent.SyncResponse) -> None:
        if self._is_stopping or self._fleet is None:
            return
        self._knows_desired = True
        self._watch.lift(desired.lifted_cordons)
        self._desired_file.save(desired)
        self._apply(self._fleet, desired)
        self._golden.follow(desired)
        self._trials.follow(desired)

    def _apply(self, fleet: NodeReplicas, desired: agent.SyncResponse) -> None:
        self._suspects.follow(desired)
        bases = [replica.base_digest for replica in desired.replicas]
        self._library.desire(bases)
        if self._artifacts is not None:
            self._artifacts.desire(bases)
        fleet.apply(desired)

    def _restart(self, base_digest: str, problem: str) -> None:
        if self._fleet is not None:
            self._fleet.fail(base_digest, problem)

    async def _keep_library(self) -> None:
        """Detect artifacts that other programs have added to the folder, and save all `Heat`."""

        async def step() -> None:
            await self._library.scan()
            await self._library.save_heat()
            self._metrics.artifacts.show(self._library)

        await run_every(
            _LIBRARY_EVERY_S, step, name="library", expected=(OSError,), step_timeout_s=60.0
        )

    async def _fetch(self) -> None:
        """Fetch artifacts, serve them to other nodes, and start replicas whose base is complete."""
        if self._artifacts is None:
            return

        async def look() -> None:
            assert self._fleet is not None
            assert self._artifacts is not None
            self._fleet.refresh()
            self._metrics.artifacts.moved(
                self._artifacts.downloaded_bytes, self._artifacts.uploaded_bytes
            )

        async with asyncio.TaskGroup() as group:
            group.create_task(self._artifacts.run())
            await run_every(_BASES_EVERY_S, look, name="bases", expected=(), step_timeout_s=5.0)

    def _why_waiting(self, base_digest: str) -> str:
        return self._artifacts.why_waiting(base_digest) if self._artifacts is not None else ""

    def _observe(self) -> agent.SyncRequest:
        replicas = self._fleet.observed() if self._fleet is not None else []
        facts = agent.NodeFacts(
            accelerator_facts=self._watch.facts(),
            region=self._settings.region,
            rack=self._settings.rack,
        )
        facts.MergeFrom(self._facts)
        reason = self._watch.why_cordoned(())
        return agent.SyncRequest(
            node_id=self._settings.node_id,
            replicas=replicas,
            facts=facts,
            is_cordoned=bool(reason),
            cordon_reason=reason,
            golden_results=self._golden.take(),
            keeps_golden_prompts=True,
            trial_results=self._trials.results(),
        )

    def _note_cordons(self) -> None:
        if self._fleet is not None:
            self._fleet.apply_cordons()
            self._note_change()

    def _note_change(self) -> None:
        self._link.note_change()
        self._update_metrics()

    def _update_metrics(self) -> None:
        assert self._fleet is not None
        observed = self._fleet.observed()
        self._metrics.set_replicas(
            [replica.state for replica in observed],
            sum(replica.memory_bytes for replica in observed),
        )
        self._metrics.set_connected(is_connected=self._link.is_connected)
        expiry = [self._launcher.certificate_expires_unix_s(it) for it in self._fleet.runners]
        self._metrics.set_engine_certificate(min(expiry, default=inf) - time.time())

    def _why_not_ready(self) -> str:
        if self._is_stopping:
            return "stopping"
        if not self._knows_desired or self._fleet is None:
            return "the desired state is not known yet: neither on disk nor from a control plane"
        if not self._fleet.is_ready:
            waiting = [
                f"{runner.replica_id}: {runner.state.phase} ({runner.state.message})"
                for runner in self._fleet.runners.values()
                if not runner.is_ready
            ]
            waiting += [f"{name}: {why}" for name, why in self._fleet.waiting.items()]
            return "; ".join(waiting)
        return ""


def limits_of(settings: AgentSettings) -> EnginePatience:
    """Return the time limits for engines that the settings define."""
    return EnginePatience(
        start_s=settings.start_timeout_s,
        start_stall_s=settings.start_stall_s,
        probe_interval_s=settings.probe_interval_s,
        probe_s=settings.probe_timeout_s,
        misses_max=settings.probe_misses_max,
        busy_misses_max=max(settings.probe_misses_max, settings.probe_busy_misses_max),
        backoff_max_s=settings.backoff_max_s,
        drain_s=settings.drain_timeout_s,
    )


def _artifacts(settings: AgentSettings, library: Library) -> ArtifactCache | None:
    """Return the component that fetches and serves artifacts, or None without a store."""
    if not settings.artifact_store_url:
        return None
    options = NodeOptions(
        node_id=settings.node_id,
        region=settings.region,
        rack=settings.rack,
        control_address=settings.control_address,
        directory=settings.artifacts_dir,
        store_url=settings.artifact_store_url,
        keys_file=settings.state_dir / "peer_keys.json",
        peer_address=settings.peer_address,
        peer_advertised=settings.peer_advertised,
        downloads_max=settings.downloads_max,
        uploads_max=settings.uploads_max,
        download_bytes_per_s=settings.download_bytes_per_second,
        upload_bytes_per_s=settings.upload_bytes_per_second,
    )
    return ArtifactCache(options, library)


def build_agent(settings: AgentSettings) -> Agent:
    """Return the agent with the real Triton launcher."""
    host = _address_of(settings.engine_host)
    launcher = TritonLauncher(
        state_dir=settings.state_dir,
        artifacts_dir=settings.artifacts_dir,
        engines=settings.engine_names,
        host=host,
        user=engine_user(settings),
        metrics_told=_reachable(settings.http_address, host),
        hides_secrets=settings.hides_secrets,
    )
    return Agent(settings, launcher, open_hardware=NvmlReader.open)


def _reachable(address: str, host: str) -> str:
    """Return a listener's address for other nodes. The node's address replaces a wildcard."""
    bound, port = host_and_port(address)
    return f"{host}:{port}" if bound in {"0.0.0.0", "::"} else address


def _address_of(host: str) -> str:
    """Return the IPv4 address of a host name, because routers need an address."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise OSError(f"AGENT__ENGINE_HOST {host} is no name of this node: {error}") from None


@contextmanager
def _exclusive(state_dir: Path) -> Generator[None]:
    """Lock the state directory while the context lasts. The process's death also unlocks it."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StateDirectoryInUseError(
                f"{state_dir} is used by the agent with process id {file.read().strip() or '?'}; "
                "stop that one, or set another AGENT__STATE_DIR"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
