"""Prepares and starts a Triton process for each replica, and removes its leftovers.

All files of a replica are in `<state_dir>/replicas/<replica id>/`. The backend directory has
symlinks into the wheel, because a copied stub would not find its libraries. The Triton model is a
copy, because the stub writes `__pycache__` beside the model. The directory also has the ports and
the log. The replica's shared memory has a unique prefix. So it can be removed after a crash without
effect on other replicas.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import MappingProxyType

import structlog

import replica
from replica.agent.artifacts.local_api import SOCKET
from replica.agent.engine_user import EngineUser
from replica.agent.installation import (
    SHM,
    STUB,
    VENDOR_TRITON,
    Installation,
    inspect_installation,
    problems_of,
)
from replica.agent.model_kinds import KINDS, LLM
from replica.agent.replica_state import EngineSpec
from replica.agent.runs import RunFile, RunRecord
from replica.agent.secret_option import SecretOption
from sluice.artifacts import artifact_path
from sluice.certificates import CertificateError, ours
from sluice.channels import engine_header
from sluice.engines import names
from sluice.process import (
    MARKER,
    ChildProcess,
    ProcessSpec,
    free_port,
    port_answers,
    port_is_free,
)
from sluice.procfs import environment, group_processes, kill_marked

log = structlog.get_logger(__name__)

MODEL = LLM.model
DEFAULT_ENGINES = names(lambda engine: engine.is_offered)
# Environment variable with the state directory, which marks all processes that an agent started.
OWNER = "SLUICE_AGENT"
EXIT_TIMEOUT_S = 5  # seconds after SIGTERM during which open streams may end
# Seconds from SIGTERM to SIGKILL. With hung streams and this exit timeout, a stop took 6-7 s.
_STOP_GRACE_S = 9.0
_EXPIRES = "certificate.expires"
_NONE: Mapping[str, int] = MappingProxyType({})
# All groups of calls, which Triton restricts to callers with the secret.
_PROTOCOLS = (
    *("health", "metadata", "inference", "shared-memory", "model-config", "model-repository"),
    *("statistics", "trace", "logging"),
)
LOOPBACK = "127.0.0.1"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LaunchError(RuntimeError):
    """The replica cannot be started as desired. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one Triton process."""

    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A prepared Triton process, and the addresses at which it will listen.

    Attributes:
        process: Spec of the process. Its log file is new for this run.
        ports: Ports of the process.
        grpc_address: host:port of Triton's gRPC.
        metrics_address: host:port and path at which the agent serves Triton's metrics, without the
            final `/metrics`, or empty without an agent.
        vital_program: File name of the stub. Triton does not detect the death of this program.
        secret: Option that other users must not read, or None if it is part of the command.
        uid: User and group id of the process, or None for those of the agent.
    """

    process: ProcessSpec
    ports: Ports
    grpc_address: str
    metrics_address: str
    vital_program: str
    run_file: RunFile
    secret: SecretOption | None = None
    uid: int | None = None

    @property
    def metrics_url(self) -> str:
        """URL of Triton's own metrics, reachable only on this node."""
        return f"http://{LOOPBACK}:{self.ports.metrics}/metrics"

    async def start(self) -> ChildProcess:
        """Start the process, and pass its secret to it.

        Raises:
            OSError: Triton cannot be started. The message names the remedy.
        """
        if self.secret is None:
            return await ChildProcess.start(self.process)
        self.secret.prepare(self.uid)
        child = await ChildProcess.start(self.process)
        try:
            await asyncio.to_thread(self.secret.hand_over, child.pid)
        except BaseException:
            await child.stop(grace_s=0)
            raise
        return child


def preflight(engines: Sequence[str] = DEFAULT_ENGINES) -> list[str]:
    """Return one line per reason why Triton cannot run on this machine, or none if it can."""
    return problems_of(inspect_installation(), engines)


def model_repository() -> Path:
    """Return the directory of Triton models in the installed wheel, or else in the checkout."""
    package = Path(replica.__file__).parent
    for candidate in (package / "_data" / "model_repo", package.parent / "model_repo"):
        if candidate.is_dir():
            return candidate
    raise LaunchError(f"no model_repo in or beside {package}; install the wheel again")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class TritonLauncher:
    """Prepares the Triton processes of one agent. Its methods block, so callers use a thread."""

    def __init__(
        self,
        *,
        state_dir: Path,
        artifacts_dir: Path,
        engines: Sequence[str] = DEFAULT_ENGINES,
        host: str = LOOPBACK,
        model_source: Path | None = None,
        user: EngineUser | None = None,
        metrics_told: str = "",
        hides_secrets: bool = True,
    ) -> None:
        """Store the directories and options that all engines share.

        Args:
            state_dir: The agent's own directory, which no other agent may use.
            artifacts_dir: Directory with one directory per artifact digest.
            engines: Drivers that this node offers.
            host: Address that Triton listens on, which routers must reach.
            model_source: Directory of the Triton model, or None for the product's own model.
            user: User of the engines, or None for the user of this process.
            metrics_told: host:port at which the agent serves the engines' metrics, or empty if it
                serves none.
            hides_secrets: Whether engines' secrets are hidden from other users of the node.
        """
        self._state_dir = state_dir.resolve()
        self._artifacts_dir = artifacts_dir.resolve()
        self._engines = tuple(engines)
        self._host = host
        self._model_source = model_source
        self._user = user
        self._metrics_address = metrics_told
        self._hides_secrets = hides_secrets
        self.owner = _short_hash(str(self._state_dir))

    @property
    def uid(self) -> int | None:
        """User and group id of engines, or None for those of the agent."""
        return self._user.uid if self._user else None

    async def remove_leftovers(self, spare: Mapping[str, int] = _NONE) -> list[int]:
        """Kill every process that agents of this state directory started, and remove its files.

        Args:
            spare: Replica id -> process group that is not killed. Its shared memory also stays.

        Returns:
            The ids of the killed processes.
        """
        killed = await kill_marked(self.owner, variable=OWNER, spare=set(spare.values()))
        kept = tuple(self._shm_prefix(replica_id) for replica_id in spare)
        _remove_shared_memory(f"sluice_{self.owner}_", kept)
        return killed

    def recorded(self) -> list[tuple[RunRecord, Launch]]:
        """Return the engines that earlier agents recorded, with their launches."""
        found: list[tuple[RunRecord, Launch]] = []
        for home in sorted(self._home("").glob("*")):
            file = RunFile(home)
            record = file.load()
            if record is not None and record.replica_id == home.name:
                ports = Ports(record.grpc_port, record.metrics_port)
                found.append((record, self._launch(record.replica_id, ports, file)))
        return found

    def is_engine(self, record: RunRecord, pid: int) -> bool:
        """Return whether a process is the recorded engine of an agent of this state directory."""
        marks = environment(pid)
        expected = self._marks(record.replica_id, record.spec)
        return (
            pid == record.pid
            and record.is_running
            and pid in group_processes(pid)
            and all(marks.get(name) == value for name, value in expected.items())
        )

    def forget(self, replica_id: str) -> None:
        """Remove the directory of a removed replica, including its log."""
        if _SAFE_NAME.fullmatch(replica_id):
            shutil.rmtree(self._home(replica_id), ignore_errors=True)

    def certificate_expires_unix_s(self, replica_id: str) -> float:
        """Return the expiry of a replica's server certificate, or infinity without mutual TLS."""
        try:
            return float((self._home(replica_id) / _EXPIRES).read_text())
        except (OSError, ValueError):
            return inf

    def prepare(self, replica_id: str, spec: EngineSpec) -> Launch:
        """Write the files that a Triton process needs, and return its launch.

        Raises:
            LaunchError: The replica cannot be started with this spec. The message names the remedy.
            OSError: The disk is full, or access is denied.
        """
        if not _SAFE_NAME.fullmatch(replica_id):
            raise LaunchError(f"replica id {replica_id!r} cannot name a directory; choose another")
        model = self._model_of(spec.engine)
        found = inspect_installation()
        if problems := problems_of(found, [spec.engine]):
            raise LaunchError("; ".join(problems))
        artifact = self._artifact(spec)
        home = self._home(replica_id)
        _link_backend(found, home / "backends" / "python")
        self._copy_model(model, home / "models")
        ports = self._ports(home / "ports.json")
        launch = self._launch(replica_id, ports, RunFile(home))
        # operators still need the log of the previous run
        with suppress(FileNotFoundError):
            (home / "triton.log").replace(home / "triton.log.1")
        launch.process.cleanup()
        option = _access_option()
        secret = SecretOption(option, home / "gate") if self._hides_secrets else None
        command = [
            *_command(found, home, model, self._shm_prefix(replica_id), self._host, ports),
            *_tls_options(home),
            *(secret.arguments if secret else (option,)),
        ]
        variables = self._environment(found, replica_id, spec, artifact)
        gate = secret.gate if secret else {}
        if secret:
            variables |= secret.environment
        if self._user:  # the gate must stop Triton itself, not the program that starts Triton
            command = self._user.command(command, gate)
        else:
            variables |= gate
        self._give(home)
        process = replace(launch.process, command=command, env=variables)
        return replace(launch, process=process, secret=secret)

    def _give(self, home: Path) -> None:
        """Make the engine's user the owner of all files of the replica, including its key."""
        uid = self.uid
        if uid is None:
            return
        for folder, _, files in os.walk(home):
            for name in ("", *files):
                os.chown(Path(folder, name), uid, uid, follow_symlinks=False)
        home.chmod(0o700)

    def _launch(self, replica_id: str, ports: Ports, run_file: RunFile) -> Launch:
        """Return a launch whose command and environment are empty until the spec is known."""
        home, prefix = self._home(replica_id), self._shm_prefix(replica_id)
        process = ProcessSpec(
            name=f"triton-{replica_id}",
            command=(),
            env={},
            log_file=home / "triton.log",
            ready=lambda: port_answers(self._host, ports.grpc),
            cwd=home,
            stop_grace_s=_STOP_GRACE_S,
            cleanup=lambda: _remove_shared_memory(prefix),
        )
        return Launch(
            process,
            ports,
            grpc_address=f"{self._host}:{ports.grpc}",
            metrics_address=self._metrics_address
            and f"{self._metrics_address}/engines/{replica_id}",
            vital_program=STUB,
            run_file=run_file,
            uid=self.uid,
        )

    def _shm_prefix(self, replica_id: str) -> str:
        return f"sluice_{self.owner}_{_short_hash(replica_id)}_"

    def _home(self, replica_id: str) -> Path:
        return self._state_dir / "replicas" / replica_id

    def _artifact(self, spec: EngineSpec) -> str:
        try:
            return str(artifact_path(self._artifacts_dir, spec.base_digest))
        except FileNotFoundError as error:
            raise LaunchError(str(error)) from None

    def _model_of(self, engine: str) -> str:
        if engine not in self._engines:
            raise LaunchError(
                f"this node does not offer the engine {engine!r} (it has "
                f"{', '.join(self._engines)}); add it to AGENT__ENGINES or move the pool"
            )
        if engine not in KINDS:
            raise LaunchError(
                f"AGENT__ENGINES offers {engine!r}, which this version does not know; it knows "
                f"{', '.join(KINDS)}"
            )
        return KINDS[engine].model

    def _copy_model(self, model: str, repository: Path) -> None:
        source = self._model_source or model_repository() / model
        if not (source / "config.pbtxt").is_file():
            raise LaunchError(f"{source} holds no config.pbtxt; install the wheel again")
        shutil.rmtree(repository, ignore_errors=True)
        shutil.copytree(source, repository / model, ignore=shutil.ignore_patterns("__pycache__"))

    def _ports(self, file: Path) -> Ports:
        """Return the ports of the last run if they are still free, otherwise new ports."""
        others = [path for path in self._state_dir.glob("replicas/*/ports.json") if path != file]
        taken = {port for path in others for port in _read_ports(path)}
        remembered = _read_ports(file)
        if (
            len(remembered) == 2
            and not taken.intersection(remembered)
            and all(port_is_free(self._host, port) for port in remembered)
        ):
            return Ports(*remembered)
        chosen: list[int] = []
        while len(chosen) < 2:
            port = free_port(self._host)
            if port not in taken and port not in chosen:
                chosen.append(port)
        file.write_text(json.dumps({"grpc": chosen[0], "metrics": chosen[1]}))
        return Ports(*chosen)

    def _marks(self, replica_id: str, spec: EngineSpec) -> dict[str, str]:
        """Return the environment variables that identify an engine's agent, replica and spec."""
        marks = {
            OWNER: self.owner,
            "SLUICE_REPLICA": replica_id,
            "SLUICE_ENGINE": spec.engine,
            "SLUICE_BASE_DIGEST": spec.base_digest,
            "SLUICE_ENGINE_OPTIONS": json.dumps(dict(spec.options)),
        }
        if spec.accelerators:  # NVML numbers GPUs in this order, but CUDA by default in another
            marks["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            marks["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.accelerators))
        return marks

    def _environment(
        self, found: Installation, replica_id: str, spec: EngineSpec, artifact: str
    ) -> dict[str, str]:
        variables = {
            "PATH": f"{found.bin_dir}:/usr/bin:/bin",
            "HOME": str(self._home(replica_id)),
            "LANG": "C.UTF-8",
            "SLUICE_ARTIFACT_DIR": artifact,
            # directory of adapters, which are loaded by digest
            "SLUICE_ARTIFACTS_DIR": str(self._artifacts_dir),
            # socket for requests for missing adapters
            "SLUICE_AGENT_SOCKET": str(self._state_dir / SOCKET),
            **self._marks(replica_id, spec),
        }
        libraries = [str(found.libpython_dir)] if found.libpython_dir else []
        if found.triton == VENDOR_TRITON:  # NVIDIA's image defines where CUDA and TensorRT are
            libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        if libraries:
            variables["LD_LIBRARY_PATH"] = ":".join(libraries)
        if MARKER in os.environ:
            variables[MARKER] = os.environ[MARKER]
        return variables


def _command(
    found: Installation, home: Path, model: str, shm_prefix: str, host: str, ports: Ports
) -> list[str]:
    assert found.triton is not None
    return [
        str(found.triton / "bin" / "tritonserver"),
        f"--model-repository={home / 'models'}",
        f"--backend-directory={home / 'backends'}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--model-control-mode=explicit",
        f"--load-model={model}",
        # The configurations are complete. Auto-completion would start every stub a second time.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        "--allow-http=false",
        f"--grpc-address={host}",
        f"--grpc-port={ports.grpc}",
        # Triton's metrics server has neither TLS nor a secret, so the agent serves the metrics.
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={ports.metrics}",
    ]


def _access_option() -> str:
    """Return the option that makes Triton answer only callers with the platform's secret.

    Without it, every client that reaches the port could load a model, and thus foreign code.
    """
    name, value = engine_header()
    return f"--grpc-restricted-protocol={','.join(_PROTOCOLS)}:{name}={value}"


def _tls_options(home: Path) -> list[str]:
    """Return Triton's options for mutual TLS. Triton reads their files only when it starts."""
    certificates = ours()
    expires = inf if certificates is None else certificates.fresh().expires_unix_s
    (home / _EXPIRES).write_text(str(expires))
    if certificates is None:
        return []
    loaded = certificates.fresh()
    try:
        files = {
            # a single file, even if MTLS__CA is a directory
            "root-cert": certificates.engine_callers(),
            "server-cert": loaded.certificate,
            "server-key": loaded.key,
        }
    except CertificateError as error:
        raise LaunchError(str(error)) from None
    for name, content in files.items():  # copies that an engine with another user can read
        file = home / f"{name}.pem"
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(content)
    return [
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        *(f"--grpc-{name}={home / name}.pem" for name in files),
    ]


def _link_backend(found: Installation, directory: Path) -> None:
    assert found.triton is not None
    assert found.stub is not None
    backend = found.triton / "backends" / "python"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for target in (
        backend / "libtriton_python.so",
        backend / "triton_python_backend_utils.py",
        found.stub,
    ):
        (directory / target.name).symlink_to(target)


def _read_ports(file: Path) -> list[int]:
    """Return the ports of the last run, or none if the file is missing or incomplete."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        ports = json.loads(file.read_text())
        return [int(ports["grpc"]), int(ports["metrics"])]
    return []


def _remove_shared_memory(prefix: str, kept: tuple[str, ...] = ()) -> None:
    for region in SHM.glob(f"{prefix}*"):
        if region.name.startswith(kept):
            continue
        try:
            region.unlink(missing_ok=True)
        except OSError as error:
            log.warning("shared_memory_not_removed", region=str(region), error=str(error))
