"""The ledger under kill -9 of everything that an event passes, in turn, under load.

Every answer that was begun is in the ledger once, with the tokens that it had; and the ledger has
the tokens that the engine says it made. The local broker forgets what it holds when it is killed
(Kafka does not): while it dies, streams run, but no event is on its way.

That this fails when offsets are stored before rows are written, was tried: see
`tests/integration/test_telemetry_service.py::test_no_event_is_lost_or_doubled_through_stops_and_kills`.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import httpx
import pytest

from tests import sse

pytestmark = pytest.mark.real

CLIENTS = 6
TENANT = "ledger"
# Of each answer. More than what canaries and probes make of an engine in one part of the plan, so
# that one request too many or too few stands out.
TOKENS = 499
LONG_TOKENS = 2_999
WAIT_S = 90.0


class Load:
    """Clients that ask again and again, each with an id of its own.

    Attributes:
        sent: Ids of all requests.
        begun: Of those whose answer began: they were accepted.
        whole: Id -> tokens, of those whose answer came to its end.
    """

    def __init__(self, stack, key: str) -> None:
        self._stack, self._key = stack, key
        self.sent: set[str] = set()
        self.begun: set[str] = set()
        self.whole: dict[str, int] = {}
        self.running: set[str] = set()
        self.tokens = TOKENS
        self.is_paused = asyncio.Event()
        self._may_ask = asyncio.Event()
        self._may_ask.set()

    async def run(self) -> None:
        async with (
            sse.session(self._stack.base_url, self._key, 120) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(CLIENTS):
                tasks.create_task(self._client(http))

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self._may_ask.wait()
            name, tokens = f"ledger-{len(self.sent)}", self.tokens
            self.sent.add(name)
            self.running.add(name)
            try:
                # A gateway that was killed: nobody listens, or the stream ends in the middle.
                with suppress(aiohttp.ClientError, TimeoutError):
                    await self._ask(http, name, tokens)
            finally:
                self.running.discard(name)
            if name not in self.whole:
                await asyncio.sleep(0.1)

    async def _ask(self, http: aiohttp.ClientSession, name: str, tokens: int) -> None:
        body = {
            "model": "sluice-tiny",
            "messages": [{"role": "user", "content": f"A story, please: {name}."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-request-id": name}
        used = 0
        async with http.post("chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                return
            self.begun.add(name)
            async for line in response.content:
                if b'"usage":{' in line:
                    used = json.loads(line[len(b"data: ") :])["usage"]["completion_tokens"]
                elif line.startswith(b"data: [DONE]"):
                    self.whole[name] = used

    async def pause(self) -> None:
        """Let all answers come to their ends, and ask for no others."""
        self._may_ask.clear()
        await until(lambda: not self.running, "all answers end")

    def go_on(self, tokens: int = TOKENS) -> None:
        self.tokens = tokens
        self._may_ask.set()


async def until(condition: Callable[[], object], what: str, every_s: float = 0.1) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"never happened: {what}"
        await asyncio.sleep(every_s)


class Ledger:
    """What telemetry tells of the tenant."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.rows: list[dict] = []
        self._lost: dict[str, dict] = {}

    def has(self, names: set[str]) -> bool:
        """Whether all of these are there, as their gateway told, or as a router that lost it."""
        try:
            answer = self._http.get("/v1/requests", params={"tenant": TENANT, "limit": 1000})
            self.rows = answer.raise_for_status().json()["data"]
            for name in names - {row["request_id"] for row in self.rows} - self._lost.keys():
                found = self._http.get(f"/v1/requests/{name}", params={"tenant": TENANT})
                if found.status_code == 404:
                    continue
                told = found.raise_for_status().json()
                # Else its row came just after the list was read, which has it the next time.
                if told["request"]["outcome"] == "gateway_lost":
                    self._lost[name] = told
        except httpx.HTTPError:  # it was killed, or its store was
            return False
        return names <= {row["request_id"] for row in self.rows} | self._lost.keys()

    @property
    def settled_tokens(self) -> int:
        """Of what gateways told; rows of killed ones come a minute later, whatever is made then."""
        told = (row for row in self.rows if row["outcome"] != "gateway_lost")
        return sum(row["output_tokens"] for row in told)

    @property
    def lost(self) -> set[str]:
        """Of killed gateways; they become rows a minute later."""
        told = {row["request_id"] for row in self.rows if row["outcome"] != "gateway_lost"}
        return self._lost.keys() - told

    @property
    def tokens(self) -> dict[str, int]:
        """Of each request; an answer may have been whole just before its gateway was killed."""
        told = {name: found["request"] for name, found in self._lost.items()}
        told |= {row["request_id"]: row for row in self.rows}
        return {name: row["output_tokens"] for name, row in told.items()}

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return self._http.get("/readyz").status_code == 200
        return False


async def until_told(load: Load, ledger: Ledger) -> None:
    """Wait until what was begun is in the ledger; to read all of it takes a while of a core."""
    await until(lambda: ledger.has(load.begun), "what was begun is told", every_s=2.0)


def made(stack) -> int:
    """Return how many tokens the engine says it has made."""
    with stack.admin() as http:
        [replica] = http.get("/v1/replicas").json()["data"]
    text = httpx.get(f"http://{replica['metrics_address']}/metrics", timeout=60).text
    found = re.search(r"^llm_output_tokens_total\S* (\S+)$", text, re.MULTILINE)
    assert found, text[-2000:]
    return int(float(found[1]))


def kill(stack, name: str) -> Callable[[], bool]:
    """Kill a process; returns whether the supervisor has started another one."""
    pid = stack.pid(name)
    os.kill(pid, signal.SIGKILL)
    return lambda: stack.pid(name) not in (0, pid)


async def kill_and_wait(stack, load: Load, ledger: Ledger, name: str) -> None:
    """Kill it under load; wait until answers that began afterwards have ended."""
    is_again = kill(stack, name)
    await until(is_again, f"{name} is started again")
    if name in ("gateway", "router"):
        before = set(load.sent)
        await until(lambda: len(load.whole.keys() - before) >= CLIENTS, "answers end again")
    else:
        await until(ledger.is_ready, f"telemetry goes on after {name}")


async def one_round(stack, load: Load, ledger: Ledger) -> None:
    for name in ("gateway", "router"):
        await kill_and_wait(stack, load, ledger, name)
    await load.pause()
    await until_told(load, ledger)
    made_before, told_before = made(stack), ledger.settled_tokens
    load.go_on()
    for name in ("telemetry", "tracestore"):
        await kill_and_wait(stack, load, ledger, name)
    await load.pause()
    await until_told(load, ledger)
    load.go_on(LONG_TOKENS)
    asked = set(load.sent)
    await until(lambda: len(load.begun - asked) == CLIENTS, "streams run")
    await kill_and_wait(stack, load, ledger, "broker")
    await load.pause()
    await until_told(load, ledger)
    # Nobody was cut, so there is nothing that could be told only nearly.
    extra = made(stack) - made_before - (ledger.settled_tokens - told_before)
    assert 0 <= extra < TOKENS, "besides, canaries and probes"
    load.go_on()


async def test_every_answer_is_in_the_ledger_once_with_its_tokens(stack) -> None:
    load = Load(stack, stack.new_key(TENANT))
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    made_before = made(stack)
    with httpx.Client(base_url=stack.telemetry_url, headers=headers, timeout=30) as http:
        ledger = Ledger(http)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run())
            await until(lambda: load.whole, "the key is known")
            await one_round(stack, load, ledger)
            await load.pause()
            running.cancel()
        await until_told(load, ledger)
    names = [row["request_id"] for row in ledger.rows]
    assert len(names) == len(set(names)), "none twice"
    assert load.begun <= set(names) | ledger.lost <= load.sent
    assert {name: ledger.tokens[name] for name in load.whole} == load.whole
    assert set(load.whole.values()) == {TOKENS, LONG_TOKENS}
    # Of each client the killed gateway had one answer at most, and one whose event was on its way.
    assert 0 < len(ledger.lost | (load.begun - load.whole.keys())) <= 2 * CLIENTS, "one gateway"
    assert ledger.settled_tokens <= made(stack) - made_before
