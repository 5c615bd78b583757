"""Measures how soon all gateways refuse the lowest tier after a router was saturated.

One operation is a burst of requests of the lowest tier to three gateway processes of a local stack.
The only replica serves 12 of these requests per second. The times begin when the router became
saturated: eight requests of the tier came within a second, and at most a quarter was admitted. The
router's own rule is applied to the outcomes of the requests that reached the router. It uses the
times when clients sent them. The router decides some milliseconds later, so the figures are too
high by these. Bursts in which gates closed before the rule was true are counted apart. A time ends
when a client has received the first refusal of a gateway's own gate. Between two requests to a
gateway are 10 ms, which is part of the figures. Not measured: a network between gateways and
router. Run: `python -m benchmarks.load.gates [ROUNDS]`.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import httpx

from benchmarks.load.gateway import FREE_TOKENS, configure
from benchmarks.load.sse_client import percentile_ms
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result
from router.core.tier_gates import GateShare
from router.core.types.request import Request
from sluice.process import free_port
from sluice.procfs import environment

ROUNDS, GATEWAYS = 30, 3
_WARM_UP = 2  # rounds that are not counted, in which the router measures speeds
_PER_S = 100.0  # requests per second to each gateway
_BURST_S = 2.0  # longest burst. It ends when each gateway has refused a request.
_PAUSE_S = 2.3  # longer than until the router opens its gates, and one second
_PATIENCE_S = 30.0
_TIER, _TENANT = "gates-low", "gates-crowd"
_TIER_FIELDS = {"priority": 0, "ttft_deadline_ms": 500}
_BODY = {
    "model": "sluice-tiny",
    "messages": [{"role": "user", "content": "Tell me about a river and a gate."}],
    "max_tokens": 16,
    "ignore_eos": True,
}
_COUNTED = ("is_served", "is_gated")  # fields of `Sent`
_GATE_TEXT = "More requests of your tier come than this model has room for."


class Sent(NamedTuple):
    """A request of the burst, with monotonic times in seconds.

    Attributes:
        gateway: Number of the gateway.
        at_s: Time at which the client sent the request.
        ended_at_s: Time at which the client had the answer's status and text.
        is_gated: Whether the gateway itself refused the request because of a gate.
        is_served: Whether the request was answered.
    """

    gateway: int
    at_s: float
    ended_at_s: float
    is_gated: bool
    is_served: bool


@dataclass(slots=True)
class GateBurst:
    """A burst of requests to all gateways at once, which ends soon after all gates have closed."""

    http: aiohttp.ClientSession
    urls: Sequence[str]
    sent: list[Sent] = field(default_factory=list[Sent])

    async def run(self) -> None:
        """Send requests, and return when all have their answers."""
        until_s = time.monotonic() + _BURST_S
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self.urls)):
                tasks.create_task(self._send(number, until_s, tasks))

    async def _send(self, gateway: int, until_s: float, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(gateway / len(self.urls) / _PER_S)
        due_s = time.monotonic()
        while due_s < until_s and len({it.gateway for it in self.sent if it.is_gated}) < len(
            self.urls
        ):
            tasks.create_task(self._ask(gateway))
            due_s += 1 / _PER_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _ask(self, gateway: int) -> None:
        at_s = time.monotonic()
        async with self.http.post(self.urls[gateway], json=_BODY) as answer:
            text, status = await answer.text(), answer.status
        if status not in {200, 503}:
            raise AssertionError(f"{status}: {text}")
        is_gated = status == 503 and _GATE_TEXT in text
        self.sent.append(Sent(gateway, at_s, time.monotonic(), is_gated, status == 200))

    def delays_s(self) -> list[float]:
        """Return the seconds from the saturation to the first gate's refusal of each gateway.

        The result is empty if gates closed before the rule was true of the requests as sent.

        Raises:
            AssertionError: A gateway refused nothing.
        """
        saturated_at_s = _saturated_at_s([it for it in self.sent if not it.is_gated])
        first_s: dict[int, float] = {}
        for it in self.sent:
            if it.is_gated:
                first_s[it.gateway] = min(it.ended_at_s, first_s.get(it.gateway, it.ended_at_s))
        if len(first_s) < len(self.urls):
            raise AssertionError(f"gates closed at {len(first_s)} of {len(self.urls)} gateways")
        if saturated_at_s is None:
            return []
        return [first_s[number] - saturated_at_s for number in range(len(self.urls))]


def _saturated_at_s(reached: Sequence[Sent]) -> float | None:
    """Return the time at which the router's rule became true of the requests that reached it."""
    in_order = sorted(reached, key=lambda it: it.at_s)
    # The gate of the round before has been open for longer than a second, without a request. The
    # router looks at it when the first request of the burst comes.
    share = GateShare(in_order[0].at_s - _PAUSE_S)
    share.step(in_order[0].at_s)
    refused = Request(handle=1, cell_id="", prompt_tokens=1)
    for it in in_order:
        if it.is_served:
            share.fitted()
            continue
        share.refused(refused, 0.0, it.at_s)
        if share.is_saturated(it.at_s):
            return it.at_s
    return None


@contextmanager
def _gateways(stack: BenchmarkStack) -> Generator[list[str]]:
    """Run further gateway processes beside the stack's own, and yield the addresses of all."""
    (pid,) = (it["pid"] for it in stack.status()["processes"] if it["name"] == "gateway")
    own = environment(pid)
    found = [stack.env["OPENAI_BASE_URL"].split("/")[2]]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(GATEWAYS - 1):
            address, ops_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            folder = stack.home / f"gateway-{len(found)}"
            folder.mkdir()
            settings = {
                "GATEWAY__INSTANCE_ID": folder.name,
                "GATEWAY__HTTP_ADDRESS": address,
                "GATEWAY__OPS_ADDRESS": ops_address,
                "GATEWAY__STATE_DIR": str(folder),
            }
            command = [sys.executable, "-m", "gateway"]
            with (folder / "log").open("wb") as log:
                env = own | settings
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            _wait_ready(ops_address)
            found.append(address)
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_PATIENCE_S)


def _wait_ready(ops_address: str) -> None:
    deadline_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_at:
        with suppress(httpx.TransportError):
            if httpx.get(f"http://{ops_address}/readyz").is_success:
                return
        time.sleep(0.2)
    raise TimeoutError(f"no gateway serves at {ops_address}")


def _new_key(stack: BenchmarkStack) -> str:
    """Create a tenant in the lowest tier, and return its key."""
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    with httpx.Client(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers, timeout=10) as admin:
        admin.put(f"/v1/tiers/{_TIER}", json=_TIER_FIELDS).raise_for_status()
        body = {"name": _TENANT, "tier_id": _TIER}
        admin.put(f"/v1/tenants/{_TENANT}", json=body).raise_for_status()
        answer = admin.post(f"/v1/tenants/{_TENANT}/keys", json={}).raise_for_status()
        return answer.json()["key"]


async def measure(addresses: Sequence[str], key: str, rounds: int) -> dict[str, Any]:
    """Run the bursts, and return the delays of single gateways and of the last gateway."""
    each: list[list[float]] = []
    answers = {"served": 0, "refused_by_router": 0, "refused_by_gates": 0}
    headers, connector = {"authorization": f"Bearer {key}"}, aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        await asyncio.sleep(_PAUSE_S)  # gateways know the key within a second
        urls = [f"http://{address}/v1/chat/completions" for address in addresses]
        for number in range(_WARM_UP + rounds):
            burst = GateBurst(http, urls)
            await burst.run()
            if number >= _WARM_UP:
                each.append(burst.delays_s())
                served, gated = (sum(getattr(it, name) for it in burst.sent) for name in _COUNTED)
                answers["served"] += served
                answers["refused_by_gates"] += gated
                answers["refused_by_router"] += len(burst.sent) - served - gated
                print([round(1000 * it) for it in each[-1]], flush=True)
            await asyncio.sleep(_PAUSE_S)
    return {
        "rounds": rounds,
        "rounds_before_the_rule": sum(not burst for burst in each),
        "gateways": GATEWAYS,
        "requests_per_s": GATEWAYS * _PER_S,
        "answers": answers,
        "one_gateway_ms": _figures([it for burst in each for it in burst]),
        "all_gateways_ms": _figures([max(burst) for burst in each if burst]),
        "each_ms": [[round(1000 * it, 1) for it in burst] for burst in each],
    }


def _figures(delays_s: list[float]) -> dict[str, float | None]:
    return {f"p{int(100 * share)}": percentile_ms(delays_s, share) for share in (0.5, 0.9, 0.99)}


def main() -> None:
    """Measure on a stack with the engine `sim`, and write the figures."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with started("sim", "--no-embeddings") as stack:
        configure(stack, sequences_max="4", cost_step_s="0.02", **FREE_TOKENS)
        with _gateways(stack) as addresses:
            figures = asyncio.run(measure(addresses, _new_key(stack), rounds))
    print(write_result("gates", __doc__ or "", figures), figures)


if __name__ == "__main__":
    main()
