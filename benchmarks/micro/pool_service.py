"""Measures the CPU time of the reports with which routers share fairness over a pool's cells.

A report has the tokens that each tenant has received in one cell since the last report. Other cells
of the pool add them to their fair queues. One operation of "tell" creates a cell's report and its
message, after all tenants were served. One operation of "hear" parses a message and adds it to the
queue of one cell. One operation of "carry" sends one message over the gRPC stream of the real
service, with sender and receiver in this process. "per_second" is the CPU time of one router per
second in a pool of `ROUTERS` routers, each with one cell and all tenants. By the rule of
`PoolReports`, at least 0.1 s lie between two reports of a router. Not measured: a network, and
cells that wait for CPU.
Run: `python -m benchmarks.micro.pool_service`.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import count

import grpc.aio

from benchmarks.results import write_result
from router.core.queue.fair_queue import FairQueue
from router.core.types.request import Request
from router.core.types.service import ServiceReport
from router.pool_reports import ACCOUNTS_MAX, INTERVAL_S, packed, unpacked
from sluice.wire.router.v1 import router_pb2 as wire

ROUTERS = 8
TENANTS = 1000
ACCOUNTS = ACCOUNTS_MAX // ROUTERS  # accounts in one report
ROUNDS = 200
MESSAGES = 2000
_METHOD = "/benchmark/Follow"


class BenchCell:
    """The fair queue of one cell, which serves all tenants in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = FairQueue()
        self.now = 0.0
        self._orders = count(1)
        for _ in range(2):  # two requests per tenant, so that one always waits
            self._push()

    def _push(self) -> None:
        for tenant in range(TENANTS):
            order = next(self._orders)
            request = Request(
                handle=order, cell_id=self.name, prompt_tokens=100, tenant_id=f"tenant-{tenant}"
            )
            request.order, request.uncached_tokens = order, 100
            self.queue.push(request, self.now)

    def serve(self) -> None:
        """Serve each tenant once, and queue another request of each tenant."""
        self.now += INTERVAL_S
        self._push()
        for _ in range(TENANTS):
            head = self.queue.peek(self.now)
            assert head is not None
            self.queue.take(head, self.now).running -= 1

    def tell(self) -> bytes:
        """Return the message of the next report."""
        accounts = self.queue.report(ACCOUNTS, self.now)
        report = ServiceReport(self.name, self.name, 1, self.queue.reports, accounts)
        return packed(self.name, [report])

    def hear(self, message: bytes) -> None:
        """Add the reports of a message to the queue."""
        for report in unpacked(wire.FollowServiceResponse.FromString(message)):
            self.queue.hear(report, self.now)


def spent_us(action: Callable[[], object]) -> float:
    """Return the CPU time of an action, in microseconds."""
    began_s = time.process_time()
    action()
    return 1e6 * (time.process_time() - began_s)


def report_costs() -> tuple[float, float, bytes]:
    """Return the mean CPU time of "tell" and "hear" in microseconds, and one message."""
    ours, theirs = BenchCell("ours"), BenchCell("theirs")
    told_us: list[float] = []
    heard_us: list[float] = []
    messages: list[bytes] = []
    for _ in range(ROUNDS):
        ours.serve()
        theirs.serve()
        told_us.append(spent_us(lambda: messages.append(ours.tell())))
        heard_us.append(spent_us(lambda: theirs.hear(messages[-1])))
    return sum(told_us) / ROUNDS, sum(heard_us) / ROUNDS, messages[-1]


async def carried_us(message: bytes) -> float:
    """Return the CPU time of a message over a stream, for both ends together, in microseconds."""

    async def follow(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(MESSAGES):
            await context.write(message)

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(follow)  # pyright: ignore[reportArgumentType]
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("benchmark", {"Follow": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        began_s = time.process_time()
        call = channel.unary_stream(_METHOD, request_serializer=bytes, response_deserializer=bytes)(
            b""
        )
        received = 0
        while isinstance(await call.read(), bytes):
            received += 1
        spent_s = time.process_time() - began_s
    await server.stop(None)
    assert received == MESSAGES
    return 1e6 * spent_s / MESSAGES


def main() -> None:
    """Measure, print and write the result."""
    tell_us, hear_us, message = report_costs()
    carry_us = asyncio.run(carried_us(message))
    readers = ROUTERS - 1
    rounds = 1 / INTERVAL_S  # 7 readers at 5 ms each need less than INTERVAL_S
    per_second_us = rounds * (tell_us + readers * (carry_us + hear_us))
    figures = {
        "routers": ROUTERS,
        "tenants": TENANTS,
        "accounts_per_message": ACCOUNTS,
        "bytes_per_message": len(message),
        "tell_us": round(tell_us, 1),
        "hear_us": round(hear_us, 1),
        "carry_us": round(carry_us, 1),
        "messages_per_second_in": round(rounds * readers),
        "per_second_ms": round(per_second_us / 1000, 1),
        "share_of_a_core": round(per_second_us / 1e6, 4),
    }
    operation = (
        "tell: one report of all tenants and its message; hear: parse and count one; carry: one"
        " message over gRPC, both ends; per_second: a router's CPU time with 8 routers of a pool."
    )
    path = write_result("pool_service", operation, figures)
    print(figures)
    print(path)


if __name__ == "__main__":
    main()
