"""The local stack as a whole: real `sluice up`, on the simulated engine, in homes of its own."""

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from cli.stack import embeddings
from cli.stack.home import Home, read_env
from cli.stack.ports import read_ports
from cli.stack.segments import mapped_files, orphaned_ids
from cli.stack.state import read_state
from replica.agent.triton import TritonLauncher
from replica.embedding.package import find_package
from sluice.process import free_port, marked_processes, port_is_free

pytestmark = pytest.mark.real

PROCESSES = {
    "supervisor",
    "postgres",
    "valkey",
    "broker",
    "tracestore",
    "control-plane",
    "agent",
    "triton",
    "router",
    "gateway",
    "telemetry",
}


@dataclass(frozen=True)
class Place:
    """A home and the command line on it."""

    home: Home
    port: int
    admin_port: int

    @property
    def up_arguments(self) -> list[str]:
        """Without embeddings, as most tests are about something else."""
        ports = [f"--port={self.port}", f"--admin-port={self.admin_port}"]
        return ["up", "--engine=sim", "--no-embeddings", *ports]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli", *arguments]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLUICE_HOME": str(self.home.root)}

    def sluice(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}\n{self.log_ends()}"
        return done

    def log_ends(self) -> str:
        files = sorted(self.home.logs.glob("*.log"))
        return "".join(f"\n--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def segments(self) -> list[Path]:
        agent = TritonLauncher(
            state_dir=self.home.service_state("agent"), artifacts_dir=self.home.artifacts
        )
        return list(Path("/dev/shm").glob(f"sluice_{agent.owner}_*"))

    def postgres_segments(self) -> list[Path]:
        """PostgreSQL's segments carry no name of ours; only those that nobody uses are counted."""
        used = mapped_files(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
        return [path for path in Path("/dev/shm").glob("PostgreSQL.*") if path not in used]

    def system_v_segments(self) -> list[int]:
        """Return the segments of the processes that the supervisor's log knows."""
        log = self.home.log_file("supervisor").read_text()
        pids = {int(pid) for pid in re.findall(r'"pid": (\d+)', log)}
        return orphaned_ids(Path("/proc/sysvipc/shm").read_text(), pids)

    def assert_nothing_is_left(self) -> None:
        assert marked_processes(self.home.marker) == []
        assert self.segments() == []
        eventually(lambda: not self.postgres_segments())  # others may just start or kill servers
        assert self.system_v_segments() == []
        ports = [self.port, self.admin_port, *read_ports(self.home.ports_file).values()]
        assert [port for port in ports if not port_is_free("127.0.0.1", port)] == []


@contextmanager
def place() -> Iterator[Place]:
    # Not pytest's folder: that is closed to the user as whom PostgreSQL runs under root.
    root = Path(tempfile.mkdtemp(prefix="sluice-stack-"))
    root.chmod(0o755)
    made = Place(Home(root), free_port(), free_port())
    try:
        yield made
    finally:
        made.sluice("down")
        shutil.rmtree(root, ignore_errors=True)


# --- homes of their own: first, so that the stack of the others does not idle beside them --------


@contextmanager
def foreground(made: Place, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    out = made.home.root / "out"
    with (
        out.open("w") as file,
        subprocess.Popen(
            [*prefix, *made.command(*made.up_arguments)],
            env=made.environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_two_ctrl_c_during_the_start_kill_at_once_and_leave_nothing() -> None:
    with place() as made, foreground(made) as process:
        eventually(lambda: marked_processes(made.home.marker))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        made.assert_nothing_is_left()


def ordinary_user() -> list[str]:
    """Return what turns a command into one of an ordinary user; nothing when we are one, or cannot."""
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    prefix = ["unshare", "--user", f"--map-user={nobody.pw_uid}", f"--map-group={nobody.pw_gid}"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if tried.returncode == 0 else []


def test_ctrl_c_in_the_foreground_as_an_ordinary_user_leaves_nothing() -> None:
    prefix = ordinary_user()
    with place() as made, foreground(made, prefix) as process:
        out = made.home.root / "out"
        eventually(lambda: "curl " in out.read_text() or process.poll() is not None)
        assert process.poll() is None, out.read_text() + made.log_ends()
        line = next(text for text in out.read_text().splitlines() if text.startswith("curl "))
        assert streamed_text(shlex.split(line))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "nothing is left running" in out.read_text()
        made.assert_nothing_is_left()
    if os.geteuid() == 0 and not prefix:
        pytest.skip("worked as root; not shown as an ordinary user: no user namespaces here")


# --- one stack for all others --------------------------------------------------------------------

DETACHED = ("--embeddings", "--detach")


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    with place() as made:
        started = made.sluice(*made.up_arguments, *DETACHED)
        (made.home.root / "printed").write_text(started.stdout)
        yield made


def eventually(check: Callable[[], object], every_s: float = 0.1) -> None:
    deadline = time.monotonic() + 240
    while not check():
        assert time.monotonic() < deadline, "not within 240 s"
        time.sleep(every_s)


def until_healthy(made: Place) -> None:
    """Wait for the whole stack; each look starts a Python, which takes half a second of a core."""
    eventually(lambda: status(made)["is_healthy"], every_s=1.0)


def status(made: Place) -> dict:
    done = subprocess.run(
        made.command("status", "--json"),
        env=made.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return json.loads(done.stdout)


def streamed_text(words: Sequence[str]) -> str:
    """Do what a printed curl line does, and return the streamed text."""
    headers = dict(value.split(": ", 1) for flag, value in pairwise(words) if flag == "-H")
    body = words[words.index("-d") + 1]
    with httpx.stream("POST", words[2], content=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def kill_supervisor(made: Place) -> None:
    os.kill(read_state(made.home).supervisor_pid, signal.SIGKILL)


def test_a_supervisor_that_is_killed_leaves_work_for_up_and_the_key_survives(running) -> None:
    key = read_env(running.home)["OPENAI_API_KEY"]
    assert running.segments(), "shared memory has another name than this test believes"
    kill_supervisor(running)
    assert "still run" in running.sluice("status", status=1).stderr

    again = running.sluice(*running.up_arguments, *DETACHED)
    assert "an earlier run was not ended properly" in again.stdout
    assert "gateway (" in again.stdout
    assert read_env(running.home)["OPENAI_API_KEY"] == key
    (line,) = [text for text in again.stdout.splitlines() if text.startswith("curl ")]
    assert streamed_text(shlex.split(line))


def test_the_printed_curl_line_streams_an_answer(running) -> None:
    printed = (running.home.root / "printed").read_text()
    (line,) = [text for text in printed.splitlines() if text.startswith("curl ")]
    assert "First token after" in printed
    assert streamed_text(shlex.split(line))
    if shutil.which("curl"):
        shown = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60
        )
        assert shown.stdout.rstrip().endswith("data: [DONE]")


def test_the_environment_file_is_for_its_owner_and_for_a_shell(running) -> None:
    assert running.home.env_file.stat().st_mode & 0o777 == 0o600
    assert running.home.secrets_file.stat().st_mode & 0o777 == 0o600
    shown = subprocess.run(
        ["bash", "-c", f"set -a; . {running.home.env_file}; env"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.partition("=")[0] for line in shown.stdout.splitlines()}
    assert names >= {"OPENAI_BASE_URL", "OPENAI_API_KEY", "SLUICE_ADMIN_URL", "SLUICE_ADMIN_KEY"}
    assert "SLUICE_DATABASE_URL" in names, "for sluice backup and psql"


def test_status_shows_every_process_healthy(running) -> None:
    until_healthy(running)
    shown = status(running)
    names = PROCESSES | ({"triton-embed"} if find_package() else set())
    assert {process["name"] for process in shown["processes"]} == names
    assert all(process["memory_mib"] > 0 for process in shown["processes"])
    assert shown["engine"] == "sim"
    table = running.sluice("status").stdout
    assert all(name in table for name in names | {"total"})


def test_the_embedding_model_has_a_replica_or_its_absence_is_said(running) -> None:
    shown = status(running)["embeddings"]
    assert f"embeddings: {shown}" in running.sluice("status").stdout
    if find_package() is None:
        printed = (running.home.root / "printed").read_text()
        assert f"embeddings are {embeddings.ABSENT}" in printed
        return
    assert shown == "all-minilm-l6-v2"
    env = read_env(running.home)
    admin = {"authorization": f"Bearer {env['SLUICE_ADMIN_KEY']}"}
    url = f"{env['SLUICE_ADMIN_URL']}/v1/replicas"

    def states() -> dict[str, str]:
        replicas = httpx.get(url, headers=admin, timeout=60).json()["data"]
        return {replica["profile"]: replica["state"] for replica in replicas}

    eventually(lambda: states() == {"frames": "ready", "embed": "ready"})
    refused = httpx.post(
        f"{env['OPENAI_BASE_URL']}/chat/completions",
        headers={"authorization": f"Bearer {env['OPENAI_API_KEY']}"},
        json={"model": shown, "messages": [{"role": "user", "content": "Hello"}]},
        timeout=60,
    )
    assert refused.status_code == 400
    assert "makes embeddings" in refused.json()["error"]["message"]


def test_starting_twice_is_one_clear_line(running) -> None:
    for arguments in (["up"], ["up", "--detach"]):
        refused = running.sluice(*arguments, status=1)
        assert refused.stdout == ""
        (line,) = refused.stderr.splitlines()
        assert "already running" in line
        assert "sluice down" in line


def test_a_taken_port_is_one_clear_line_that_names_the_fix(running) -> None:
    with place() as other, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--admin-port"):
            refused = other.sluice(*other.up_arguments, f"{option}={port}", "--detach", status=1)
            (line,) = refused.stderr.splitlines()
            assert f"port {port} is taken" in line
            assert f"pid {os.getpid()}" in line
            assert option in line


def test_logs_and_their_names(running) -> None:
    assert running.sluice("logs", "gateway", "-n", "3").stdout
    assert running.sluice("logs", "triton", "-n", "3").stdout
    refused = running.sluice("logs", "nobody", status=1)
    assert "gateway" in refused.stderr


def test_tenants_keys_and_models_from_the_command_line(running) -> None:
    def answer(key: str) -> int:
        url = f"{read_env(running.home)['OPENAI_BASE_URL']}/models"
        return httpx.get(url, headers={"authorization": f"Bearer {key}"}, timeout=60).status_code

    running.sluice("tenants", "create", "acme", "--tier=free", "--name=Acme")
    tenants = json.loads(running.sluice("tenants", "list", "--json").stdout)
    assert {"acme", "demo"} <= {tenant["id"] for tenant in tenants}
    key = running.sluice("keys", "create", "acme").stdout.strip()
    eventually(lambda: answer(key) == 200)
    (listed,) = json.loads(running.sluice("keys", "list", "acme", "--json").stdout)
    assert key not in json.dumps(listed)
    running.sluice("keys", "revoke", "acme", listed["id"])
    eventually(lambda: answer(key) == 401)
    assert "sluice-tiny" in running.sluice("models", "list").stdout
    (alias,) = json.loads(running.sluice("models", "alias", "list", "--json").stdout)
    assert (alias["id"], alias["target"]) == ("default", "sluice-tiny")
    refused = running.sluice("keys", "list", "nobody", status=1)
    assert len(refused.stderr.splitlines()) == 1


def test_requests_shows_the_prompt(running) -> None:
    env = read_env(running.home)
    answer = httpx.post(
        f"{env['OPENAI_BASE_URL']}/chat/completions",
        headers={"authorization": f"Bearer {env['OPENAI_API_KEY']}"},
        json={
            "model": "sluice-tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 5,
        },
        timeout=60,
    )
    request_id = answer.headers["x-request-id"]

    def rows() -> list[dict]:
        shown = json.loads(running.sluice("requests", "--limit=50", "--json").stdout)
        return [row for row in shown if row["request_id"] == request_id]

    eventually(rows, every_s=0.5)
    assert rows()[0]["tenant_id"] == "demo"
    assert request_id in running.sluice("requests").stdout


# Metrics whose series exist only after something has happened, or with hardware: nothing to see here.
UNSEEN = {
    "agent_golden_askings_total",  # no golden prompt was due yet
    "agent_xids_total",
    "llm_replica_hour_price",  # no price list
    "agent_accelerator_memory_used_bytes",
    "agent_accelerator_power_watts",
    "agent_accelerator_temperature_celsius",
    "control_plane_quality_deviations_total",
    "control_plane_rollbacks_total",
    "llm_adapter_tokens_total",
    "llm_release_judged_drop_ratio",  # no answer of `auto` was judged
    "llm_request_aborts_total",
    "gateway_copies_total",
    "sluice_pool_replicas_late_seconds",  # no pool was given more replicas that do not come
    "gateway_worker_ends_total",  # there is one worker, and so no parent
}


def test_every_metric_of_rules_and_dashboards_is_told_by_some_process(running) -> None:
    from tests.unit.observability.known import PROMETHEUS, all_expressions, scraped_series

    until_healthy(running)
    test_requests_shows_the_prompt(running)
    folder = running.home.root / "targets"
    script = [sys.executable, str(PROMETHEUS / "targets.py"), str(folder)]
    wanted = set().union(*map(scraped_series, all_expressions()))
    assert {name for name, _ in wanted} >= UNSEEN

    def missing() -> set[tuple[str, str]]:
        subprocess.run(script, env=running.environment(), check=True, timeout=60)
        groups = [it for file in folder.glob("*.json") for it in json.loads(file.read_text())]
        pages = [
            httpx.get(
                f"http://{it}{group['labels'].get('__metrics_path__', '/metrics')}", timeout=60
            )
            for group in groups
            for it in group["targets"]
        ]
        seen = set[tuple[str, str]]()
        for line in "\n".join(page.text for page in pages).splitlines():
            if found := re.match(r"(\w+?)(?:_bucket)?(?:\{(.*)\})? ", line):
                pairs = re.findall(r'\w+="[^"]*"', found[2] or "")
                seen |= {(found[1], pair) for pair in ("", *pairs)}
        return {it for it in wanted - seen if it[0] not in UNSEEN}

    # Engines and the control plane tell some of them only after a moment.
    eventually(lambda: not missing(), every_s=0.5)
    engines = json.loads((folder / "engine.json").read_text())
    assert all(
        group["labels"].keys() == {"pool", "replica", "__metrics_path__"} for group in engines
    )


@pytest.mark.parametrize("name", ["telemetry", "postgres", "router"])
def test_a_killed_process_is_restarted_and_that_is_said(running, name) -> None:
    until_healthy(running)
    before = read_state(running.home).process(name)
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: read_state(running.home).process(name).restarts == before.restarts + 1)
    until_healthy(running)
    assert read_state(running.home).process(name).pid != before.pid
    assert f"{name} ended with status -9" in running.sluice("logs", "supervisor").stdout


def test_an_agent_that_is_killed_leaves_the_engines_to_its_successor(running) -> None:
    def engines() -> set[int]:
        shown = status(running)["processes"]
        return {process["pid"] for process in shown if process["name"].startswith("triton")}

    until_healthy(running)
    before, agent = engines(), read_state(running.home).process("agent")
    assert before
    os.kill(agent.pid, signal.SIGKILL)
    eventually(lambda: read_state(running.home).process("agent").restarts == agent.restarts + 1)
    until_healthy(running)
    assert engines() == before


def test_a_supervisor_that_is_killed_leaves_work_for_down(running) -> None:
    """The last one: what others would find is gone."""
    kill_supervisor(running)
    ended = running.sluice("down")
    assert "gateway (" in ended.stdout
    running.assert_nothing_is_left()
    assert "nothing runs" in running.sluice("down").stdout
