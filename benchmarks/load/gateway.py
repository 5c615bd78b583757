"""What gateway and router add to an engine, and how many streams a worker holds.

One operation: one request through gateway, router and the `sim` driver inside a real Triton, with
keys, limits, tokenizing and events on. Not measured: a network, TLS, an engine that computes; the
clients run on the same cores and take their part of them. Run:
`python -m benchmarks.load.gateway ttft|jitter|prompts|unary|streams`; `soak` takes an hour, or
`soak MINUTES`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import psutil

from benchmarks.load.jitter import added
from benchmarks.load.parked import churned, parked, running_site
from benchmarks.load.replica import Attached, prompt
from benchmarks.load.sse_client import cpu_seconds, run_load, tallied_load
from benchmarks.load.stack import Stack, started
from benchmarks.results import write_result
from sluice.kserve import HostStream

_STEP_S = 0.02
_PARKED = 10_000
_SOAK_MIN = 60
_CHURN_PER_S = 50
_SOAK_STEP_S = 0.2  # the router looks at all open streams at each of its steps


def _configure(stack: Stack, **options: str) -> None:
    """Give the engine other options, and wait until it serves with them."""
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


def _lengthen_context(stack: Stack, tokens: int) -> None:
    """Let the gateway take longer prompts than the base was made for; `sim` does not mind."""
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


def _groups(stack: Stack) -> dict[str, list[int]]:
    pids = {p["name"]: [p["pid"]] for p in stack.status()["processes"]}
    return {name: pids[name] for name in ("gateway", "router")}


def measure_ttft(stack: Stack) -> dict[str, Any]:
    """One request after the other on an engine whose steps take no time: all of it is overhead.

    `engine_ms` is the way to the first token for who is attached to the same Triton, without
    gateway and router, in turns with the requests; read what these two add as the difference.
    """
    _configure(
        stack,
        cost_step_s="0",
        cost_decode_row_s="0",
        cost_prefill_token_s="0",
        cost_context_token_s="0",
    )
    load = replace(stack.load(1, 250), max_tokens=4)
    asyncio.run(run_load(replace(load, requests=100)))
    rounds: list[dict[str, Any]] = []
    for _ in range(3):
        one = asyncio.run(run_load(load, _groups(stack)))
        rounds.append(one | {"engine_ms": asyncio.run(_engine_ttft(stack, load.requests))})
    best = min(rounds, key=lambda one: one["ttft_ms"]["p50"])
    added = {p: round(best["ttft_ms"][p] - best["engine_ms"][p], 2) for p in ("p50", "p99")}
    return {"added_ms": added, "best_round": best, "rounds": rounds}


async def _engine_ttft(stack: Stack, requests: int) -> dict[str, float]:
    """Return milliseconds to the first token straight from Triton, one sequence after the other."""
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    async with httpx.AsyncClient(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers) as admin:
        replicas = (await admin.get("/v1/replicas")).json()["data"]
    address, model = replicas[0]["grpc_address"], replicas[0]["triton_model"]
    async with HostStream(address, model, silence_s=10.0) as stream:
        await stream.open(timeout_s=10.0)
        attached = Attached(stream)
        await attached.attach()
        found = [(await attached.generate([prompt(30)], 1))[0] * 1e3 for _ in range(requests)]
    found.sort()
    return {f"p{p}": round(found[len(found) * p // 100], 2) for p in (50, 90, 99)}


def measure_jitter(stack: Stack) -> dict[str, Any]:
    """What comes on top of the engine's steps of 20 ms, by number of streams.

    Streams begin spread over the length of an answer, as they do in life. Read `added_gap_ms`: by
    how much gaps at the client are longer than those of the engine. Triton's own way from the step
    to the wire is in it, and so is the client's time, which shares the cores.
    """
    steps_file = stack.home / "steps"
    _configure(
        stack,
        cost_step_s=str(_STEP_S),
        cost_decode_row_s="0",
        cost_prefill_token_s="0",
        cost_context_token_s="0",
        steps_file=str(steps_file),
    )
    figures: dict[str, Any] = {"step_ms": _STEP_S * 1e3}
    for streams in (50, 200, 500):
        load = replace(stack.load(streams, 4 * streams), ramp_s=100 * _STEP_S)
        steps_file.write_text("")
        before = psutil.cpu_times()
        one, tally = asyncio.run(tallied_load(load, _groups(stack)))
        after = psutil.cpu_times()
        one |= added(tally.arrivals_s, [float(it) for it in steps_file.read_text().split()])
        busy = (
            sum(after) - sum(before) - (after.idle - before.idle) - (after.iowait - before.iowait)
        )
        one["machine_busy"] = round(busy / (sum(after) - sum(before)), 2)
        figures[f"{streams}_streams"] = one
    return figures


def measure_prompts(stack: Stack) -> dict[str, Any]:
    """TTFT of short requests alone, and beside two prompts of 220 KB per second.

    The engine computes prompts in no time: what others wait for is gateway and router.
    """
    _lengthen_context(stack, 200_000)
    _configure(
        stack,
        context_tokens_max="200000",
        blocks="20000",
        cost_prefill_token_s="0",
        cost_context_token_s="0",
    )
    short = replace(stack.load(8, 400), max_tokens=20)
    asyncio.run(run_load(replace(short, requests=50)))
    alone = asyncio.run(run_load(short))
    text = "The river ran past the mill and the gate was shut. " * (220_000 // 51)

    async def beside() -> tuple[dict[str, Any], list[int]]:
        statuses: list[int] = []
        async with (
            httpx.AsyncClient(
                base_url=stack.env["OPENAI_BASE_URL"],
                headers={"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"},
                timeout=60,
            ) as http,
            asyncio.TaskGroup() as tasks,
        ):

            async def long(number: int) -> None:
                content = f"{number} {text}"
                body = {"model": short.model, "messages": [{"role": "user", "content": content}]}
                answer = await http.post("/chat/completions", json=body | {"max_tokens": 1})
                statuses.append(answer.status_code)

            async def send_long() -> None:
                for number in range(1000):
                    tasks.create_task(long(number))
                    await asyncio.sleep(0.5)

            sending = tasks.create_task(send_long())
            figures = await run_load(short)
            sending.cancel()
        return figures, statuses

    with_long, statuses = asyncio.run(beside())
    page = httpx.get(stack.env["OPENAI_BASE_URL"].removesuffix("/v1") + "/metrics").text
    lag = [line for line in page.splitlines() if line.startswith("gateway_loop_lag_seconds_bucket")]
    return {"alone": alone, "beside": with_long, "long_statuses": statuses, "loop_lag": lag}


def measure_unary(stack: Stack) -> dict[str, Any]:
    """Whole answers of one token; CPU per request of gateway and router."""
    _configure(stack, cost_step_s="0.001", cost_decode_row_s="0", sequences_max="4000")
    groups = _groups(stack)
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
    """Memory of one worker per open stream, and again after all of them have left.

    A gateway process, Valkey, a router with a script: see `benchmarks.load.parked`.
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
    """Memory of one worker with 10,000 open streams, of which 50 come and go in each second.

    A gateway process, Valkey, a router with a script: see `benchmarks.load.parked`. There is no
    broker: events go to the spool. Read whether `mib` still grows after the first minutes.
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
    """Run the measures that are named, or all but the soak; each has a result file of its own."""
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
