"""Many streams at once, of every kind, lost and refused anywhere: exact bytes on kept connections.

Each case is drawn from a seed. The client reads chunks and events strictly, so that a byte too many
anywhere, also behind the end of a response, fails the case that follows on the same connection.
"""

import asyncio
import json
import random
from dataclasses import dataclass

import pytest

from gateway.dispatch import retry_budget
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost", message="gone")
FAILED = wire.Outcome(kind=wire.OUTCOME_KIND_FAILED, code="engine_failed", message="no")
BUSY = wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="engine_busy", message="busy")
LENGTH = wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
CONNECTIONS, REQUESTS = 16, 6


class Sometimes:
    """A loop that lags now and then."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    @property
    def is_lagging(self) -> bool:
        return self._random.random() < 0.5


@dataclass
class Case:
    """One request, and how its answers come."""

    name: str
    n: int
    is_stream: bool
    stop: str
    has_logprobs: bool
    failing: int  # which answer is refused; -1: none
    random: random.Random

    @property
    def body(self) -> dict[str, object]:
        options = {"stream_options": {"include_usage": True}} if self.is_stream else {}
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "n": self.n,
            "stream": self.is_stream,
            "logprobs": self.has_logprobs,
            **({"stop": self.stop} if self.stop else {}),
            **options,
        }

    def plan(self, ids: list[int], submit: wire.Submit, losses: int) -> Plan:
        """Go on where the submission stands: to the end, or to a loss."""
        draw, left = self.random, ids[submit.resumed_tokens :]
        if submit.resumed_tokens and draw.random() < 0.2:
            return Plan([], BUSY)
        number = int(submit.request_id.removeprefix(self.name).removeprefix("-") or 0)
        outcome = LENGTH
        if number == self.failing:
            left, outcome = left[: draw.randrange(len(left) + 1)], FAILED
        elif losses < 2 and draw.random() < 0.4:
            left, outcome = left[: draw.randrange(len(left) + 1)], LOST
        steps: list[list[int]] = []
        while left:
            size = draw.choice((0, 1, 1, 1, 1, 2, 3))
            steps.append(left[:size])
            left = left[size:]
        return Plan(steps, outcome)


def drawn(name: str, seed: int) -> Case:
    draw = random.Random(seed)
    n, stop = draw.choice((1, 1, 2, 3)), draw.choice(("", "", "zzz", "owns a"))
    can_fail = stop != "owns a"  # that ends the answer before it fails
    return Case(
        name=name,
        n=n,
        is_stream=draw.random() < 0.8,
        stop=stop,
        has_logprobs=draw.random() < 0.3,
        failing=draw.randrange(n) if can_fail and draw.random() < 0.3 else -1,
        random=draw,
    )


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body of what must be exactly one response."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), head
    status = int(head.split(b" ", 2)[1])
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    if b"content-length" in fields:
        return status, await reader.readexactly(int(fields[b"content-length"]))
    body = b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        chunk = await reader.readexactly(size + 2)
        assert chunk.endswith(b"\r\n")
        body += chunk[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return status, body


def check_stream(case: Case, body: bytes, expected: str, reason: str, ids: list[int]) -> None:
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    data = [event[6:] for event in events if event.startswith("data: ")]
    assert all(event.startswith(("data: ", ": keep-alive")) for event in events)
    texts, reasons = [""] * case.n, [""] * case.n
    told: list[list[int]] = [[] for _ in range(case.n)]
    is_done = data[-1] == "[DONE]"
    documents = [json.loads(it) for it in (data[:-1] if is_done else data)]
    for document in documents:
        for choice in document.get("choices", ()):
            index = choice["index"]
            assert not reasons[index], "nothing follows the end of a choice"
            texts[index] += choice["delta"].get("content") or ""
            reasons[index] = choice["finish_reason"] or ""
            for entry in (choice.get("logprobs") or {}).get("content", ()):
                told[index].append(-round(entry["logprob"] * 1000))
    if case.failing < 0:
        assert is_done, documents[-1]
        assert texts == [expected] * case.n
        assert reasons == [reason] * case.n
        assert documents[-1]["usage"]["completion_tokens"] >= case.n
    else:
        assert documents[-1]["error"]["code"] == "engine_failed"
        assert all(expected.startswith(text) for text in texts)
    for entries in told if case.has_logprobs else ():
        assert entries == ids[: len(entries)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_streams_are_exact_under_any_interruption(world, monkeypatch, seed: int) -> None:
    async with world(keep_alive_s=0.02) as w:
        w.gateway.pace._lag = Sometimes()
        ids = w.ids(w.text)
        cases = {
            f"c{number}.{turn}": drawn(f"c{number}.{turn}", seed * 1000 + number * 10 + turn)
            for number in range(CONNECTIONS)
            for turn in range(REQUESTS)
        }
        losses: dict[str, int] = {}

        def plan(submit: wire.Submit) -> Plan:
            case = cases[submit.request_id.partition("-")[0]]
            made = case.plan(ids, submit, losses.get(submit.request_id, 0))
            if made.outcome is LOST:
                losses[submit.request_id] = losses.get(submit.request_id, 0) + 1
            return made

        w.router.plan = plan
        monkeypatch.setattr(retry_budget, "ALWAYS", 10_000)  # what is lost on purpose is no storm

        async def client(number: int) -> None:
            host, port = w.base_url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            for turn in range(REQUESTS):
                case = cases[f"c{number}.{turn}"]
                content = json.dumps(case.body).encode()
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
                    b"x-request-id: %b\r\nContent-Length: %d\r\n\r\n%b"
                    % (KEY.encode(), case.name.encode(), len(content), content)
                )
                status, body = await read_response(reader)
                expected = w.text.split(case.stop)[0] if case.stop else w.text
                reason = "length" if expected == w.text else "stop"
                if case.is_stream and status == 200:
                    check_stream(case, body, expected, reason, ids)
                elif case.failing >= 0:
                    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
                else:
                    assert status == 200, body
                    texts = [it["message"]["content"] for it in json.loads(body)["choices"]]
                    assert texts == [expected] * case.n
                await asyncio.sleep(0.03)  # more than anything is held
            assert not reader._buffer, "bytes behind the last response"

        writers: list[asyncio.StreamWriter] = []
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for number in range(CONNECTIONS):
                    tasks.create_task(client(number))
        finally:
            for writer in writers:
                writer.close()
        assert w.gateway.dispatcher.open == 0
        assert w.gateway.links.in_flight == 0
