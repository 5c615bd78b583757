"""The part of `make compose-check` that needs an engine and images: see deploy/compose/check.sh.

`python deploy/compose/check.py --work FOLDER [--standins] [--results]`, in the repository's root.
Brings the project `sluice-check` up from nothing, streams an answer, kills each of our containers
once, restarts each in turn under load with the profile `ha`, and removes everything.

One operation: `docker compose up -d` with images built, to the first answer; and a restart of each
of our containers in turn under 32 streams. Not measured: building.
"""  # noqa: INP001 - a script beside what it checks

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.results import write_result
from tests.sse import chunks

STANDINS = Path("deploy/compose/standins")
PORTS = {
    "GATEWAY_PORT": 18000,
    "ADMIN_PORT": 18001,
    "TELEMETRY_PORT": 18002,
    "FRONT_PORT": 18010,
    "GRAFANA_PORT": 13000,
    "PROMETHEUS_PORT": 19090,
}
OURS = ("gateway", "router", "replica-cpu", "control-plane", "telemetry")
# In the order of an upgrade.
ROLLED = (
    *("control-plane", "telemetry", "router", "router-2", "gateway", "gateway-2"),
    *("replica-cpu", "targets"),
)
STREAMS = 32
EDGE_MB_MAX = 150.0  # unpacked, of the image that gateways and routers run from
# Of one stream: an answer waits while the only replica restarts.
STREAM_S = 180.0
_START_S = 300.0
_SETTLE_S = 180.0
_CALL_S = 900.0
_COMMON: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me a story."}],
}


class CheckError(Exception):
    """The check did not pass."""


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stdout.write(f"compose-check: {text}\n")
    sys.stdout.flush()


def rows(told: str) -> list[dict[str, Any]]:
    """Return what `--format json` told: an object per line, or one list, by the version."""
    if told.lstrip().startswith("["):
        return json.loads(told)
    return [json.loads(line) for line in told.splitlines() if line.strip()]


@dataclass(slots=True)
class Project:
    """The containers of the check."""

    work: Path
    files: list[str]
    environment: dict[str, str]

    def compose(self, *arguments: str, is_checked: bool = True) -> str:
        """Run `docker compose`; return what it wrote.

        Raises:
            CheckError: It did not end well.
        """
        command = ["docker", "compose", *self.files, *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=_CALL_S,
            check=False,
        )
        if is_checked and done.returncode:
            raise CheckError(f"docker compose {' '.join(arguments)}: {done.stderr[-2000:]}")
        return done.stdout

    def states(self) -> dict[str, dict[str, Any]]:
        """Return each container as `docker compose ps` tells it, by service."""
        return {
            row["Service"]: row for row in rows(self.compose("ps", "--all", "--format", "json"))
        }

    async def until(self, what: str, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait.

        Raises:
            CheckError: It took longer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - Docker has to be asked
                    await asyncio.sleep(0.5)
                return
        raise CheckError(f"after {timeout_s:g} s: not {what}")

    def unhealthy(self) -> list[str]:
        """Return the services that are not what they should be, with their state."""
        return [
            f"{name}: {row['State']} {row['Health']} {row['ExitCode']}"
            for name, row in self.states().items()
            if not (
                (row["State"] == "running" and row["Health"] == "healthy")
                or (row["State"] == "exited" and row["ExitCode"] == 0)
            )
        ]

    async def healthy(self, timeout_s: float = _SETTLE_S) -> None:
        """Wait until every container is healthy, or has ended well.

        Raises:
            CheckError: One is not.
        """
        try:
            await self.until("healthy", lambda: not self.unhealthy(), timeout_s)
        except CheckError as error:
            raise CheckError(f"{error}: {self.unhealthy()}") from None

    def sluice(self, *arguments: str) -> str:
        """Run the command `sluice` of this checkout against the project; empty when it fails."""
        command = [sys.executable, "-m", "cli", "--context", "compose", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=60.0,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(slots=True)
class Load:
    """Streams without a pause, until told otherwise."""

    url: str
    key: str
    ended: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, streams: int) -> None:
        """Keep so many streams going until `stop`; each then ends its answer."""
        async with client(self.url, self.key) as http, asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._one(http, number))

    async def _one(self, http: aiohttp.ClientSession, number: int) -> None:
        while not self.stop.is_set():
            try:
                await streamed(http, max_tokens=48 + 8 * number)
            except (AssertionError, OSError, TimeoutError, aiohttp.ClientError) as error:
                self.failed[f"{type(error).__name__}: {str(error)[:200]}"] += 1
                await asyncio.sleep(0.5)
            self.ended += 1


def client(url: str, key: str) -> aiohttp.ClientSession:
    """Return a session for `streamed`; whatever certificate is shown is taken."""
    return aiohttp.ClientSession(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(total=STREAM_S),
        connector=aiohttp.TCPConnector(limit=0, ssl=False),
    )


async def streamed(http: aiohttp.ClientSession, max_tokens: int = 8) -> None:
    """Read one answer.

    Raises:
        AssertionError: It was refused, had an error, no text, or did not end well.
    """
    count = 0
    async for chunk in chunks(http, {**_COMMON, "max_tokens": max_tokens}):
        count += sum(bool(choice["delta"].get("content")) for choice in chunk["choices"])
    if not count:
        raise AssertionError("an answer without text")


async def answered(url: str, key: str, timeout_s: float = 90.0) -> None:
    """Wait for an answer that ends well.

    Raises:
        CheckError: None came.
    """
    last: Exception | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), client(url, key) as http:
            while True:
                try:
                    await streamed(http)
                except (AssertionError, OSError, aiohttp.ClientError) as error:
                    last = error
                    await asyncio.sleep(0.5)
                else:
                    return
    raise CheckError(f"no answer in {timeout_s:g} s, at last: {last!r}")


async def start(project: Project) -> tuple[str, dict[str, float]]:
    """Bring everything up; return a key, and how long it took."""
    began = time.monotonic()
    await asyncio.to_thread(project.compose, "up", "--detach", "--no-build")
    up_s = time.monotonic() - began
    say(f"docker compose up returned after {up_s:.1f} s")
    keys: list[str] = []

    def has_key() -> bool:
        if key := project.sluice("keys", "create", "demo"):
            keys.append(key.split()[-1])
        return bool(keys)

    # The tenant comes with the bootstrap.
    await project.until("a tenant", has_key, _START_S)
    await answered(gateway_url(), keys[0])
    token_s = time.monotonic() - began
    say(f"first answer after {token_s:.1f} s")
    await project.healthy()
    healthy_s = time.monotonic() - began
    say(f"all healthy after {healthy_s:.1f} s: {', '.join(sorted(project.states()))}")
    took = {"up_s": up_s, "first_answer_s": token_s, "all_healthy_s": healthy_s}
    return keys[0], {name: round(value, 1) for name, value in took.items()}


def gateway_url() -> str:
    """Return where one gateway is published."""
    return f"http://127.0.0.1:{PORTS['GATEWAY_PORT']}/v1/"


def front_url() -> str:
    """Return where the front of both gateways is published."""
    return f"https://127.0.0.1:{PORTS['FRONT_PORT']}/v1/"


def kill(project: Project, service: str) -> str:
    """End a container's first process without a word; return who starts it again.

    From the outside, where this process may: only then the engine takes it for a crash.
    """
    container = project.states()[service]["ID"]
    found = subprocess.run(
        ["docker", "inspect", "--format", "{{.State.Pid}}", container],
        capture_output=True,
        text=True,
        env=project.environment,
        check=True,
    )
    pid = int(found.stdout)
    in_container = f"docker/{container}" in _cgroups(pid) or container in _cgroups(pid)
    if os.geteuid() == 0 and in_container:
        os.kill(pid, signal.SIGKILL)
        return "its restart policy"
    project.compose("kill", service)
    project.compose("up", "--detach", "--no-recreate", "--no-deps", "--no-build", service)
    return "hand"


def _cgroups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


async def killed_once(project: Project, key: str) -> dict[str, float]:
    """Kill each of ours; return how long each was gone, until an answer and its health."""
    took: dict[str, float] = {}
    for service in OURS:
        began = time.monotonic()
        by = await asyncio.to_thread(kill, project, service)
        await answered(gateway_url(), key)
        answer_s = time.monotonic() - began
        await project.healthy()
        took[service] = round(time.monotonic() - began, 1)
        say(
            f"{service} killed, started by {by}: answer {answer_s:.1f} s, healthy {took[service]} s"
        )
    return took


def certificate(folder: Path) -> None:
    """Make one for the front, of the user that HAProxy runs as."""
    folder.mkdir(mode=0o700, exist_ok=True)
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-keyout", str(folder / "tls.key")),
        *("-out", str(folder / "tls.crt")),
    ]
    subprocess.run(command, capture_output=True, check=True)
    for path in (folder, *folder.iterdir()):
        os.chown(path, 99, 99)


def gateways_in_front(project: Project) -> int:
    """Return how many gateways the front sends requests to."""
    page = project.compose(
        *("exec", "-T", "front", "wget", "-q", "-O", "-", "http://127.0.0.1:8404/metrics"),
        is_checked=False,
    )
    wanted = 'haproxy_backend_active_servers{proxy="gateways"} '
    lines = [line for line in page.splitlines() if line.startswith(wanted)]
    return int(float(lines[0].removeprefix(wanted))) if lines else 0


async def rolled(project: Project, key: str) -> dict[str, Any]:
    """Restart each of ours in turn under load with the profile `ha`; return what became of it."""
    await asyncio.to_thread(certificate, project.work / "tls")
    project.environment["COMPOSE_PROFILES"] += ",ha"
    await asyncio.to_thread(project.compose, "up", "--detach", "--no-build")
    await project.healthy()

    def is_whole() -> bool:
        return gateways_in_front(project) == 2

    await project.until("both gateways in the front", is_whole, 60.0)
    await answered(front_url(), key)
    load = Load(front_url(), key)
    steps: dict[str, Any] = {}
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(STREAMS))
        try:
            await asyncio.sleep(5.0)
            for service in ROLLED:
                before, began = (load.ended, load.failed.total()), time.monotonic()
                await asyncio.to_thread(project.compose, "restart", "--no-deps", service)
                await project.healthy()
                await project.until("both gateways in the front", is_whole, 60.0)
                steps[service] = {
                    "seconds": round(time.monotonic() - began, 1),
                    "requests": load.ended - before[0],
                    "failed": load.failed.total() - before[1],
                }
                say(f"{service} restarted under {STREAMS} streams: {steps[service]}")
        finally:
            load.stop.set()
    if load.failed:
        say(f"failed: {dict(load.failed)}")
    return {
        "streams": STREAMS,
        "requests": load.ended,
        "failed": load.failed.total(),
        "reasons": dict(load.failed),
        "restarts": steps,
    }


def sizes(project: Project) -> dict[str, dict[str, float]]:
    """Return our images' sizes in MB: unpacked, as `docker images` tells, and packed by gzip -6.

    Both with their base.

    Raises:
        CheckError: The one of gateways and routers is not small.
    """
    found: dict[str, dict[str, float]] = {}
    for image in ("sluice-edge:check", "sluice:check", "sluice-replica-cpu:check"):
        commands = {
            "unpacked_mb": f"docker image inspect --format '{{{{.Size}}}}' {image}",
            "packed_mb": f"docker save {image} | gzip -6 | wc -c",
        }
        found[image] = {}
        for name, command in commands.items():
            done = subprocess.run(
                ["bash", "-c", command],
                capture_output=True,
                text=True,
                env=project.environment,
                check=True,
                timeout=_CALL_S,
            )
            found[image][name] = round(int(done.stdout) / 1e6, 1)
    say(json.dumps(found))
    if (edge_mb := found["sluice-edge:check"]["unpacked_mb"]) > EDGE_MB_MAX:
        raise CheckError(f"sluice-edge has {edge_mb} MB, more than {EDGE_MB_MAX:g}")
    return found


def prepared(work: Path, *, has_standins: bool) -> Project:
    """Write the project's .env and context; return it."""
    work.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "COMPOSE_PROJECT_NAME": "sluice-check",
        "SLUICE_VERSION": "check",
        "SLUICE_HOME": str(work / "home"),
        "TLS_DIR": str(work / "tls"),
        "COMPOSE_PROFILES": "observability",
    }
    env_file = work / "env"
    env_file.write_text("".join(f"{name}={port}\n" for name, port in PORTS.items()))
    subprocess.run(
        [sys.executable, "-m", "cli", "compose", "init", "--file", str(env_file)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=60.0,
    )
    files = ["--env-file", str(env_file), "--file", "docker-compose.yml"]
    if has_standins:
        files[:0] = ["--env-file", str(STANDINS / "images.env")]
        files += ["--file", str(STANDINS / "override.yml")]
    for extra in os.environ.get("COMPOSE_CHECK_FILES", "").split():
        files += ["--file", extra]
    return Project(work, files, environment)


async def check(project: Project) -> dict[str, Any]:
    """Run all of it.

    Raises:
        CheckError: Something is not as it should be.
    """
    load = round(os.getloadavg()[0], 1)
    key, took = await start(project)
    killed = await killed_once(project, key)
    rolling = await rolled(project, key)
    figures = {
        "load_average_before": load,
        "start": took,
        "killed_s": killed,
        "rolling_restart": rolling,
    }
    say(json.dumps(figures))
    if rolling["failed"]:
        raise CheckError(f"{rolling['failed']} of {rolling['requests']} requests failed")
    return figures


def main() -> int:
    """Return 0 when everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files of the check")
    parser.add_argument("--standins", action="store_true", help="servers from stand-ins")
    parser.add_argument("--results", action="store_true", help="write benchmarks/results")
    arguments = parser.parse_args()
    project = prepared(arguments.work, has_standins=arguments.standins)
    try:
        figures = asyncio.run(check(project))
        figures["images"] = sizes(project)
        if arguments.results:
            figures["standins"] = arguments.standins
            operation = " ".join((__doc__ or "").rpartition("One operation: ")[2].split())
            say(f"wrote {write_result('compose', operation, figures)}")
    except CheckError as error:
        say(f"FAILED: {error}")
        sys.stdout.write(project.compose("logs", "--no-color", "--tail", "30", is_checked=False))
        return 1
    finally:
        project.compose(
            *("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10"),
            is_checked=False,
        )
        shutil.rmtree(arguments.work, ignore_errors=True)
    say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
