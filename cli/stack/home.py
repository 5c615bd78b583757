"""Names the files and directories of one local stack, all below SLUICE_HOME.

env           variables for clients (KEY=VALUE lines, mode 0600)
contexts/     the same variables of other installations, one file each
secrets.json  secrets that the first start generates (mode 0600)
ports.json    the internal ports
run/          state of the running stack, and the lock of its supervisor
logs/         one file per process
artifacts/    bases by digest
artifact-store/ chunks of uploaded artifacts
certificates/ certificates for `up --tls`, with their CAs
data/ state/  data of the servers, state of the services
"""

import fcntl
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from sluice.ids import new_secret


def write_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a file atomically, so that readers get either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    staging.replace(path)


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one stack, below the absolute path `root`."""

    root: Path

    @classmethod
    def find(cls, explicit: Path | None = None) -> "Home":
        """Return `explicit`, or else $SLUICE_HOME, or else `.sluice` in the current directory."""
        chosen = explicit or Path(os.environ.get("SLUICE_HOME") or ".sluice")
        return cls(chosen.expanduser().resolve())

    @property
    def marker(self) -> str:
        """The marker in the environment of every process of this stack."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:16]

    @property
    def env_file(self) -> Path:
        """The environment file for clients, read by `set -a; . .sluice/env`."""
        return self.root / "env"

    def context_file(self, name: str) -> Path:
        """The environment file of another installation, for `sluice --context NAME`."""
        return self.root / "contexts" / f"{name}.env"

    @property
    def secrets_file(self) -> Path:
        """The file of secrets, which commands never print."""
        return self.root / "secrets.json"

    @property
    def ports_file(self) -> Path:
        """The file of internal ports, which are reused by later starts."""
        return self.root / "ports.json"

    @property
    def state_file(self) -> Path:
        """The file that records the running stack."""
        return self.root / "run" / "stack.json"

    @property
    def lock_file(self) -> Path:
        """The file that the supervisor locks until it ends."""
        return self.root / "run" / "lock"

    @property
    def tracestore_password_file(self) -> Path:
        """The file with the password of the trace store's server, copied from `Secrets`."""
        return self.root / "run" / "tracestore.password"

    @property
    def logs(self) -> Path:
        """The directory of logs, one file per process."""
        return self.root / "logs"

    @property
    def artifacts(self) -> Path:
        """The directory of bases by digest."""
        return self.root / "artifacts"

    @property
    def artifact_store(self) -> Path:
        """The directory of chunks of uploaded artifacts."""
        return self.root / "artifact-store"

    @property
    def certificates(self) -> Path:
        """The directory of certificates for mutual TLS, whose CAs later starts reuse."""
        return self.root / "certificates"

    def data(self, name: str) -> Path:
        """Return the directory of a server's data, which the server's launcher creates."""
        return self.root / "data" / name

    def service_state(self, name: str) -> Path:
        """Return the directory of a service's state, which is reused by later starts."""
        return self.root / "state" / name

    def log_file(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.logs / f"{name}.log"


_PREFIXES = {
    "admin_key": "sk-sluice-admin",
    "valkey_password": "valkey",
    "tracestore_password": "traces",
    "broker_password": "broker",
    "installation_secret": "installation",
}


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets of a stack, generated at its first start."""

    admin_key: str
    valkey_password: str
    tracestore_password: str
    broker_password: str
    installation_secret: str
    demo_key_id: str = ""
    demo_key: str = ""

    @property
    def admin_key_sha256(self) -> str:
        """The SHA-256 of the admin key, which services receive instead of the key."""
        return hashlib.sha256(self.admin_key.encode()).hexdigest()


def load_secrets(home: Home) -> Secrets:
    """Return the stack's secrets, after generating and storing missing ones."""
    known: dict[str, str] = {}
    with suppress(FileNotFoundError):
        known = json.loads(home.secrets_file.read_text())
    missing = {name: new_secret(prefix) for name, prefix in _PREFIXES.items() if name not in known}
    secrets = Secrets(**{**known, **missing})
    if missing:
        save_secrets(home, secrets)
    return secrets


def stored_secret(home: Home) -> str:
    """Return the stack's installation secret, or an empty string if none can be read."""
    with suppress(OSError, ValueError):
        return str(json.loads(home.secrets_file.read_text()).get("installation_secret", ""))
    return ""


def save_secrets(home: Home, secrets: Secrets) -> None:
    """Store the secrets, readable by their owner only."""
    write_atomic(home.secrets_file, json.dumps(asdict(secrets), indent=1) + "\n", mode=0o600)


def with_demo_key(secrets: Secrets, key_id: str, key: str) -> Secrets:
    """Return the secrets with the demo tenant's key."""
    return replace(secrets, demo_key_id=key_id, demo_key=key)


def render_env(values: dict[str, str]) -> str:
    """Return KEY=VALUE lines. Values must have no characters that a shell would interpret."""
    for name, value in values.items():
        assert value, name
        assert not set(value) & set(" '\"$`\\\n;&|<>()"), name
    return "".join(f"{name}={value}\n" for name, value in values.items())


def parse_env(text: str) -> dict[str, str]:
    """Return the variables in lines of `render_env`, without lines of other forms."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def read_env(home: Home) -> dict[str, str]:
    """Return the client environment of the stack, empty if the stack never ran."""
    try:
        return parse_env(home.env_file.read_text())
    except FileNotFoundError:
        return {}


def try_lock(home: Home) -> IO[str] | None:
    """Return the lock of this home, or None if a supervisor holds the lock.

    The kernel releases the lock when its holder ends, so a lock never outlives its process.
    Children do not inherit the lock.
    """
    home.lock_file.parent.mkdir(parents=True, exist_ok=True)
    file = home.lock_file.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
