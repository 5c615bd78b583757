"""Measures the latency that gateway and router add, and the memory of a worker's open streams.

One operation is one request through gateway, router and the `sim` driver inside a real Triton, with
keys, limits, tokenizing and events on. Clients run on the same cores, which slows the servers. Not
measured: a network, TLS, an engine that computes. `soak` runs for an hour, or for `MINUTES`. Run:
`python -m benchmarks.load.gateway ttft|jitter|prompts|unary|streams|soak [MINUTES]`.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.load.jitter import added
from benchmarks.load.long_prompts import KINDS, OwnEngine, sent
from benchmarks.load.parked import churned, parked, running_site
from benchmarks.load.replica import Attached, prompt
from benchmarks.load.sse_client import (
    StreamLoad,
    cpu_seconds,
    percentile_ms,
    run_load,
    tallied_load,
)
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.load.straight import replica_of, straight_arrivals
from benchmarks.results import write_result
from cli.stack.home import Home, stored_secret
from cli.stack.ports import read_ports
from sluice.kserve import HostStream

STEP_S = 0.02
# Options of the `sim` engine with which a step of many tokens is as short as a step of one token.
FREE_TOKENS = {
    "cost_decode_row_s": "0",
    "cost_prefill_token_s": "0",
    "cost_context_token_s": "0",
}
_ROUNDS = 3
_JITTER_STREAMS = (50, 200, 500)  # numbers of streams. 500 streams use about 60 % of two cores
_JITTER_FIGURES = ("requests", "errors", "problems", "tokens", "ttft_ms", "cpu_us_per_token")
_PARKED = 10_000
_SOAK_MIN = 60
_CHURN_PER_S = 50
_SOAK_STEP_S = 0.2  # long, because each step costs the router work for all open streams


def configure(stack: BenchmarkStack, **options: str) -> None:
    """Change the engine's options, and wait until the engine serves with them."""
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    with httpx.Client(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers, timeout=10) as admin:
        pool = next(it for it in admin.get("/v1/pools").json()["data"] if it["engine"] == "sim")
        body = {"base_digest": pool["base_digest"], "engine": "sim", "replicas_wanted": 1}
        admin.put(
            f"/v1/pools/{pool['id']}", json=body | {"engine_options": options}
        ).raise_for_status()

        def is_ready() -> bool:
            return all(it["state"] == "ready" for it in admin.get("/v1/replicas").json()["data"])

        _wait(lambda: not is_ready())
        _wait(is_ready)
    _wait(lambda: not asyncio.run(run_load(replace(stack.load(1, 1), max_tokens=2)))["errors"])


def lengthen_context(stack: BenchmarkStack, tokens: int) -> None:
    """Raise the context limit of the base, because `sim` itself has none."""
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    with httpx.Client(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers, timeout=10) as admin:
        pool = next(it for it in admin.get("/v1/pools").json()["data"] if it["engine"] == "sim")
        path = f"/v1/bases/{pool['base_digest']}"
        base = admin.get(path).json()
        body = {"name": base["name"], "context_tokens_max": tokens}
        admin.put(path, json=body).raise_for_status()


def _wait(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("the engine did not come back with its new options")
        time.sleep(0.1)


def groups_of(stack: BenchmarkStack) -> dict[str, list[int]]:
    """Return the pids of the processes whose CPU time is measured, by name."""
    pids = {p["name"]: [p["pid"]] for p in stack.status()["processes"]}
    return {name: pids[name] for name in ("gateway", "router")}


def measure_ttft(stack: BenchmarkStack) -> dict[str, Any]:
    """Measure requests one after the other on an engine whose steps need no time.

    So the whole TTFT is overhead. `engine_ms` is the TTFT of a client that is attached directly to
    the same Triton, measured alternately with the requests. The difference is the overhead of
    gateway and router.
    """
    configure(stack, cost_step_s="0", **FREE_TOKENS)
    load = replace(stack.load(1, 250), max_tokens=4)
    asyncio.run(run_load(replace(load, requests=100)))
    rounds: list[dict[str, Any]] = []
    for _ in range(3):
        one = asyncio.run(run_load(load, groups_of(stack)))
        rounds.append(one | {"engine_ms": asyncio.run(_engine_ttft(stack, load.requests))})
    best = min(rounds, key=lambda one: one["ttft_ms"]["p50"])
    added = {p: round(best["ttft_ms"][p] - best["engine_ms"][p], 2) for p in ("p50", "p99")}
    return {"added_ms": added, "best_round": best, "rounds": rounds}


async def _engine_ttft(stack: BenchmarkStack, requests: int) -> dict[str, float]:
    """Return the TTFT of sequences sent directly to Triton, one after another, in milliseconds."""
    replica = await replica_of(stack)
    address, model = replica["grpc_address"], replica["triton_model"]
    async with HostStream(address, model, silence_s=10.0) as stream:
        await stream.open(timeout_s=10.0)
        attached = Attached(stream)
        await attached.attach()
        found = [(await attached.generate([prompt(30)], 1))[0] * 1e3 for _ in range(requests)]
    found.sort()
    return {f"p{p}": round(found[len(found) * p // 100], 2) for p in (50, 90, 99)}


def measure_jitter(stack: BenchmarkStack) -> dict[str, Any]:
    """Measure how much longer the gaps between tokens are than the engine's steps of 20 ms.

    `through` has the gaps of streams through gateway and router, by the kernel's arrival times at
    the client. `straight` has the gaps of an equal number of sequences that are attached directly
    to the same Triton, measured alternately. The gaps of `straight` are caused by engine host,
    Triton and the machine. `added_p99_ms` is what gateway and router add, as the median over the
    rounds of the difference of both. Streams start at different times, evenly over the length of an
    answer. The client uses the same cores as the servers. `machine_busy` is the share of the cores
    in use by all processes.
    """
    # Engines run as a user of their own, who may not write to the stack's home.
    with tempfile.TemporaryDirectory(prefix="sluice-steps-") as folder:
        Path(folder).chmod(0o777)
        return _jitter(stack, Path(folder, "steps"))


def _jitter(stack: BenchmarkStack, steps_file: Path) -> dict[str, Any]:
    configure(stack, cost_step_s=str(STEP_S), **FREE_TOKENS, steps_file=str(steps_file))

    def through(load: StreamLoad) -> tuple[dict[str, Any], Sequence[Sequence[float]]]:
        figures, tally = asyncio.run(tallied_load(load, groups_of(stack)))
        return {name: figures[name] for name in _JITTER_FIGURES}, tally.arrivals_s

    def straight(load: StreamLoad) -> tuple[dict[str, Any], Sequence[Sequence[float]]]:
        return {}, asyncio.run(straight_arrivals(stack, load))

    def one(load: StreamLoad, run: Callable[[StreamLoad], Any]) -> dict[str, Any]:
        steps_file.write_text("")
        before = psutil.cpu_times()
        figures, arrivals_s = run(load)
        after = psutil.cpu_times()
        steps_s = [float(it) for it in steps_file.read_text().split()]
        return {"machine_busy": _busy(before, after), **added(arrivals_s, steps_s), **figures}

    figures: dict[str, Any] = {"step_ms": STEP_S * 1e3}
    for streams in _JITTER_STREAMS:
        ramp_s = 100 * STEP_S
        load = replace(stack.load(streams, 2 * streams), ramp_s=ramp_s, is_stamped=True)
        rounds = [
            {run.__name__: one(load, run) for run in (through, straight)} for _ in range(_ROUNDS)
        ]
        p99s = [
            (it["through"]["added_gap_ms"]["p99"], it["straight"]["added_gap_ms"]["p99"])
            for it in rounds
        ]
        figures[f"{streams}_streams"] = {
            "added_p99_ms": round(median(own - engine for own, engine in p99s), 2),
            "through_p99_ms": median(own for own, _ in p99s),
            "straight_p99_ms": median(engine for _, engine in p99s),
            "machine_busy": median(it["through"]["machine_busy"] for it in rounds),
            "rounds": rounds,
        }
    return figures


def _busy(before: Any, after: Any) -> float:
    """Return the mean share of busy cores between two readings of the machine's CPU times."""
    total = sum(after) - sum(before)
    idle = after.idle - before.idle + after.iowait - before.iowait
    return round(1 - idle / total, 2)


def measure_prompts(stack: BenchmarkStack) -> dict[str, Any]:
    """Measure the TTFT of short requests alone, and beside two prompts of 220 KB per second.

    Eight clients repeat short requests without a pause, so the cores are nearly busy. The engine
    computes any prompt in one step that takes no time. Another process sends the long prompts. In
    `beside_gateway` it sends them through the gateway, which is the case of interest. In the other
    cases it causes an equal amount of work elsewhere on the machine (see
    `benchmarks.load.long_prompts`). Rounds of the cases alternate. Percentiles are of all rounds
    together, and `p99_of_rounds_ms` has one for each round.
    """
    lengthen_context(stack, 200_000)
    configure(
        stack,
        context_tokens_max="200000",
        step_tokens_max="200000",
        blocks="20000",
        cost_prefill_token_s="0",
        cost_context_token_s="0",
    )
    replica = asyncio.run(replica_of(stack))
    secret = stored_secret(Home(stack.home))
    engine = OwnEngine(replica["grpc_address"], replica["triton_model"], secret)
    short = replace(stack.load(8, 400), max_tokens=20)
    asyncio.run(run_load(replace(short, requests=50)))
    ttft_s: dict[str, list[list[float]]] = {}
    long_ms: dict[str, list[float]] = {}
    errors = 0
    for _ in range(_ROUNDS):
        for kind in ("", *KINDS):
            with sent(kind, short, engine) if kind else nullcontext([]) as took_ms:
                figures, tally = asyncio.run(tallied_load(short))
            errors += figures["errors"]
            name = f"beside_{kind}" if kind else "alone"
            ttft_s.setdefault(name, []).append(tally.ttft_s)
            long_ms.setdefault(name, []).extend(took_ms)
    port = read_ports(Home(stack.home).ports_file)["gateway_ops"]
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    lag = [line for line in page.splitlines() if line.startswith("gateway_loop_lag_seconds_bucket")]
    figures = {name: _ttft(rounds, long_ms[name]) for name, rounds in ttft_s.items()}
    return {**figures, "errors": errors, "loop_lag": lag}


def _ttft(rounds: list[list[float]], long_ms: list[float]) -> dict[str, Any]:
    every = [seconds for one in rounds for seconds in one]
    return {
        "requests": len(every),
        "ttft_ms": {f"p{int(q * 100)}": percentile_ms(every, q) for q in (0.5, 0.9, 0.99)},
        "p99_of_rounds_ms": [percentile_ms(one, 0.99) for one in rounds],
        "long_ms": sorted(long_ms),
    }


def measure_unary(stack: BenchmarkStack) -> dict[str, Any]:
    """Measure unary answers of one token, with the CPU time of gateway and router per request."""
    configure(stack, cost_step_s="0.001", cost_decode_row_s="0", sequences_max="4000")
    groups = groups_of(stack)
    body = json.dumps(
        {
            "model": "sluice-tiny",
            "messages": [{"role": "user", "content": "Tell me about a river and a gate."}],
            "max_tokens": 1,
        }
    ).encode()
    url = stack.env["OPENAI_BASE_URL"].split("/")[2].split(":")

    async def connection(until_s: float, counts: list[int]) -> None:
        reader, writer = await asyncio.open_connection(url[0], int(url[1]))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {stack.env['OPENAI_API_KEY']}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        while time.monotonic() < until_s:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            counts[answer.startswith(b"HTTP/1.1 200")] += 1
        writer.close()

    async def run(seconds: float) -> list[int]:
        counts = [0, 0]
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(64):
                tasks.create_task(connection(until_s, counts))
        return counts

    asyncio.run(run(2))
    before = cpu_seconds(groups)
    failed, served = asyncio.run(run(8))
    after = cpu_seconds(groups)
    return {
        "workers": 1,
        "connections": 64,
        "requests_per_s": round(served / 8),
        "failed": failed,
        "cpu_us_per_request": {
            name: round((after[name] - before[name]) / max(1, served) * 1e6) for name in groups
        },
    }


async def measure_streams() -> dict[str, Any]:
    """Measure a worker's memory per open stream, and its memory after all streams have ended.

    The worker runs with Valkey and a scripted router (see `benchmarks.load.parked`).
    """
    async with running_site() as site:
        await parked(site, 50)
        empty = site.rss_bytes
        rounds = [(await parked(site, _PARKED), site.rss_bytes) for _ in range(2)]
    return {
        "streams": _PARKED,
        "empty_mib": round(empty / 2**20, 1),
        "rounds": [
            {"held_mib": round(held / 2**20, 1), "after_mib": round(after / 2**20, 1)}
            for held, after in rounds
        ],
        "kib_per_stream": round((rounds[0][0] - empty) / _PARKED / 1024, 2),
        "kib_per_stream_later": round((rounds[1][0] - empty) / _PARKED / 1024, 2),
    }


async def measure_soak(minutes: int) -> dict[str, Any]:
    """Measure the memory of one worker with 10,000 open streams, 50 of them replaced per second.

    The worker runs with Valkey and a scripted router (see `benchmarks.load.parked`). There is no
    broker, so events are spooled to disk. The memory `mib` should not grow after the first minutes.
    """
    async with running_site(_SOAK_STEP_S) as site:
        churn = await churned(site, _PARKED, _CHURN_PER_S, minutes)
    return {
        "streams": _PARKED,
        "per_s": round((churn.begun - _PARKED) / churn.seconds, 1),
        "minutes": round(churn.seconds / 60, 1),
        "begun": churn.begun,
        "refused": churn.refused,
        "cut_by_the_gateway": churn.cut,
        "mib": [round(it / 2**20, 1) for it in churn.rss_bytes],
    }


_MEASURES = {
    "ttft": measure_ttft,
    "jitter": measure_jitter,
    "prompts": measure_prompts,
    "unary": measure_unary,
}


def main() -> None:
    """Run the named measurements, by default all except `soak`, and write a result of each."""
    named = sys.argv[1:] or [*_MEASURES, "streams"]
    minutes = int(named.pop()) if named[-2:-1] == ["soak"] else _SOAK_MIN
    for name in named:
        if name == "streams":
            text, figures = measure_streams.__doc__, asyncio.run(measure_streams())
        elif name == "soak":
            text, figures = measure_soak.__doc__, asyncio.run(measure_soak(minutes))
        else:
            measure = _MEASURES[name]
            with started("sim", "--no-embeddings") as stack:
                text, figures = measure.__doc__, measure(stack)
        text = f"{__doc__}\n{text}"
        print(write_result(f"gateway_{name}", text, figures), json.dumps(figures))


if __name__ == "__main__":
    main()
