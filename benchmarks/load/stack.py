"""Measures the whole platform on this machine: start-up, memory, CPU per token, throughput.

One operation of `start` is a `sluice up --detach` in an empty folder. One operation of `proxy` is
one streamed token through router and gateway on the `sim` driver. One operation of `engine` is one
streamed answer of 100 tokens on the `openvino` driver. One operation of `cancel` is the disconnect
of 16 clients. Client, servers and engine share the machine. So wall-clock figures are pessimistic,
and CPU per token is more reliable. Not measured: installation, TLS, a network. Run:
`python -m benchmarks.load.stack [start] [proxy] [engine] [cancel]`.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine_alone import SHIPPED_BASE, closed_loop
from benchmarks.load.sse_client import StreamLoad, run_load
from benchmarks.results import write_result
from cli.stack.home import Home, stored_secret
from cli.stack.seed import TENANT
from cli.stack.state import read_state
from replica.drivers.openvino import load_openvino
from sluice import shared_secret
from sluice.process import free_port
from sluice.shared_secret import SharedSecret

_PATIENCE = ("--ttft-deadline-ms", "600000")
_LIMITS = {"rpm": 1_000_000_000, "tpm": 1_000_000_000, "requests_max": 1_000_000}


class BenchmarkStack:
    """A running local stack, whose tenant has limits."""

    def __init__(self, home: Path, began_unix_s: float) -> None:
        self.home = home
        self.start_s = time.time() - began_unix_s
        state = read_state(Home(home))
        assert state is not None
        self.first_token_s = state.first_token_unix_s - began_unix_s
        lines = (home / "env").read_text().splitlines()
        self.env = dict(line.split("=", 1) for line in lines if "=" in line)

    def status(self) -> dict[str, Any]:
        """Return the output of `sluice status --json`."""
        shown = _sluice(self.home, "status", "--json", capture=True)
        return json.loads(shown.stdout)

    def load(self, streams: int, requests: int, **options: Any) -> StreamLoad:
        """Return a load against the stack's gateway."""
        host, _, port = self.env["OPENAI_BASE_URL"].split("/")[2].partition(":")
        return StreamLoad(host, int(port), self.env["OPENAI_API_KEY"], streams, requests, **options)

    def tenant_key(self, tenant: str, *options: str) -> str:
        """Create a tenant with options of `sluice tenants create`. Returns a key of this tenant."""
        _sluice(self.home, "tenants", "create", tenant, *options)
        shown = _sluice(self.home, "keys", "create", tenant, "--json", capture=True)
        return json.loads(shown.stdout)["key"]

    def budget(self) -> None:
        """Set a budget that the tenant cannot use up."""
        arguments = ("tenants", "budget", "set", TENANT, "monthly", "--tokens", "1000000000000")
        _sluice(self.home, *arguments)

    def limit(self) -> None:
        """Set limits that the tenant cannot reach, so that each request checks limits.

        The tenant's tier gets no deadline that could refuse requests, because the benchmark
        measures streams, not admission.
        """
        headers = {"authorization": f"Bearer {self.env['SLUICE_ADMIN_KEY']}"}
        with httpx.Client(
            base_url=self.env["SLUICE_ADMIN_URL"], headers=headers, timeout=10
        ) as admin:
            body = admin.get(f"/v1/tenants/{TENANT}").raise_for_status().json()
            _sluice(self.home, "tiers", "update", body["tier_id"], *_PATIENCE)
            wanted = {name: body[name] for name in ("name", "tier_id", "weight")}
            admin.put(f"/v1/tenants/{TENANT}", json=wanted | {"limits": _LIMITS}).raise_for_status()
        answer = {"model": "default", "prompt": "a", "max_tokens": 1}
        headers = {"authorization": f"Bearer {self.env['OPENAI_API_KEY']}"}
        url = f"{self.env['OPENAI_BASE_URL']}/completions"
        for _ in range(100):
            told = httpx.post(url, json=answer, headers=headers, timeout=10)
            if "x-ratelimit-limit-requests" in told.headers:
                return
            time.sleep(0.1)
        raise TimeoutError("the gateway does not know of the limits within 10 s")


def _sluice(home: Path, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**os.environ, "SLUICE_HOME": str(home)},
        check=capture is False,
        capture_output=capture,
        text=True,
        timeout=300,
    )


@contextmanager
def started(engine: str, *options: str) -> Generator[BenchmarkStack]:
    """Start a stack in a fresh folder and stop it again."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        home, ports = Path(folder) / "home", (str(free_port()), str(free_port()))
        home.mkdir()
        Path(folder).chmod(0o755)
        began_unix_s = time.time()
        try:
            _sluice(
                home,
                "up",
                "--detach",
                "--engine",
                engine,
                "--port",
                ports[0],
                "--admin-port",
                ports[1],
                *options,
            )
            stack = BenchmarkStack(home, began_unix_s)
            # Clients that are attached directly to engines prove that they belong to the stack.
            shared_secret.install(SharedSecret([stored_secret(Home(home))]))
            stack.limit()
            yield stack
        finally:
            _sluice(home, "down")


def measure_start() -> None:
    """Measure the seconds of `sluice up --detach` until the first token and until its end."""
    with started("openvino") as stack:
        status = stack.status()
        processes = {p["name"]: p["memory_mib"] for p in status["processes"]}
        figures = {
            "seconds_to_first_token": round(stack.first_token_s, 1),
            "seconds_to_return": round(stack.start_s, 1),
            "memory_mib": processes,
            "memory_total_mib": round(sum(processes.values())),
        }
    print(write_result("stack_start", measure_start.__doc__ or "", figures), figures)


def measure_proxy() -> None:
    """Measure one streamed token through router and gateway, with keys, limits and tokenizing on.

    The engine is the `sim` driver inside a real Triton. CPU time of engine and client is not
    counted. Answers have 100 tokens, so the figure per token includes a hundredth of a request's
    fixed cost. Answers of `500_long_streams` have 1,000 tokens, and answers of `*_short_streams`
    have two. For these, `cpu_us_per_request` is the cost of a request with its two tokens.
    """
    with started("sim", "--no-embeddings") as stack:
        pids = {p["name"]: [p["pid"]] for p in stack.status()["processes"]}
        groups = {name: pids[name] for name in ("gateway", "router")}
        asyncio.run(run_load(stack.load(100, 200), groups))  # warm up
        figures = {
            f"{streams}_streams": _totals(
                asyncio.run(run_load(stack.load(streams, 4 * streams), groups))
            )
            for streams in (100, 500)
        }
        long = stack.load(500, 500, max_tokens=1000)
        figures["500_long_streams"] = _totals(asyncio.run(run_load(long, groups)))
        for streams in (100, 500):
            short = stack.load(streams, 4000, max_tokens=2)
            figures[f"{streams}_short_streams"] = _per_request(asyncio.run(run_load(short, groups)))
    print(write_result("proxy_cpu", measure_proxy.__doc__ or "", figures), figures)


def _totals(figures: dict[str, Any]) -> dict[str, Any]:
    total = sum(figures["cpu_us_per_token"].values())
    return {**figures, "cpu_us_per_token_total": round(total, 2)}


def _per_request(figures: dict[str, Any]) -> dict[str, Any]:
    each = {name: cpu_s / figures["requests"] * 1e6 for name, cpu_s in figures["cpu_s"].items()}
    return {**figures, "cpu_us_per_request": {name: round(it) for name, it in each.items()}}


def measure_engine() -> None:
    """Measure streamed answers of 100 tokens, in 64 streams on the `openvino` driver.

    Rounds through the platform alternate with rounds of the driver alone in this process. The
    driver gets an equal number of prompts of the same length, and the same temperature. In the
    rounds of the platform, client, platform and engine share the cores. In the other rounds, the
    driver alone uses all cores.
    """
    driver = load_openvino(SHIPPED_BASE, "benchmark", {})
    closed_loop(driver, 64, 64)
    through: list[dict[str, Any]] = []
    alone: list[int] = []
    with started("openvino", "--no-embeddings") as stack:
        asyncio.run(run_load(stack.load(64, 64)))  # warm up
        for _ in range(5):
            alone.append(round(closed_loop(driver, 64, 320)))
            through.append(asyncio.run(run_load(stack.load(64, 320))))
    tokens_per_s = [figures["tokens_per_s"] for figures in through]
    ratio = statistics.median(tokens_per_s) / statistics.median(alone)
    figures = {
        "tokens_per_s_through": tokens_per_s,
        "tokens_per_s_alone": alone,
        "ratio_of_medians": round(ratio, 3),
        "rounds": through,
    }
    print(write_result("through_everything", measure_engine.__doc__ or "", figures), ratio)


def measure_cancel() -> None:
    """Measure the time from the disconnect of 16 clients until the engine has freed all KV blocks.

    The benchmark polls the number of used KV blocks in Triton's metrics every 5 ms. The engine host
    updates this metric every 0.25 s.
    """
    with started("sim", "--no-embeddings") as stack:
        seconds = [round(asyncio.run(_hang_up(stack)), 3) for _ in range(10)]
        figures = {"seconds": seconds, "worst_s": max(seconds)}
    print(write_result("cancel", measure_cancel.__doc__ or "", figures), figures)


async def _hang_up(stack: BenchmarkStack) -> float:
    load = stack.load(16, 16, max_tokens=3000)
    streams = [await asyncio.open_connection(load.host, load.port) for _ in range(load.streams)]
    for _, writer in streams:
        writer.write(load.request())
    for reader, _ in streams:
        await reader.readuntil(b'"content":"')
    async with httpx.AsyncClient(timeout=5) as http:
        admin = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
        replicas = await http.get(f"{stack.env['SLUICE_ADMIN_URL']}/v1/replicas", headers=admin)
        url = f"http://{replicas.json()['data'][0]['metrics_address']}/metrics"
        await _until(http, url, lambda used: used > 0)
        began_s = time.perf_counter()
        for _, writer in streams:
            writer.transport.abort()
        await _until(http, url, lambda used: used == 0)
        return time.perf_counter() - began_s


async def _until(http: httpx.AsyncClient, url: str, is_done: Callable[[float], bool]) -> None:
    """Poll the number of KV blocks in use until `is_done` is true, for at most 10 s."""
    for _ in range(2000):
        text = (await http.get(url)).text
        found = re.search(r'kv_cache_block_type="used"[^}]*\} (\S+)', text)
        assert found, text
        if is_done(float(found[1])):
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("the engine's KV blocks did not change within 10 s")


def main() -> None:
    """Run the measurements named on the command line, all of them by default."""
    measurements = {
        "start": measure_start,
        "proxy": measure_proxy,
        "engine": measure_engine,
        "cancel": measure_cancel,
    }
    if unknown := set(sys.argv[1:]) - measurements.keys():
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(measurements)}")
    for name in sys.argv[1:] or measurements:
        measurements[name]()


if __name__ == "__main__":
    main()
