"""Requests nodes from actuators, one task per actuator, so that a slow actuator delays no other.

Only the newest request of an actuator is sent. After a refusal the pause before the next request
doubles.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts.notices import encoded, signature
from control_plane.alerts.sending import SendError, post
from control_plane.scaling import nodes_repository
from control_plane.scaling.actuators import Actuator
from control_plane.scaling.kubernetes import set_scale
from control_plane.scaling.memory import EFFECT_FACTOR
from control_plane.scaling.nodes import AskOutcome, NodesAsk, asked_nodes
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_RETRY_MAX_S = 300.0
_RETRY_FIRST_S = 5.0
_FAILURES_MAX = 8
# A webhook receives the same request again after this time, because it may have lost the first
# request.
_REPEAT_S = 60.0


class NodeAsking:
    """Owns one task per actuator.

    Compares the nodes of each actuator with the need, and requests missing nodes.
    """

    def __init__(
        self,
        actuators: Mapping[str, Actuator],
        count: Callable[[str, str], None],
        show: Callable[[Mapping[str, NodesAsk]], None],
    ) -> None:
        """Create one task per actuator. `run` must be started in a TaskGroup.

        Args:
            actuators: All actuators by name.
            count: Called with the name of an actuator and the result of a request.
            show: Called with the request of each actuator, for metrics. The mapping is empty while
                another control plane leads.
        """
        self._actuators = actuators
        self._show = show
        self._tasks = {name: _Asker(one, count) for name, one in actuators.items()}

    async def look(
        self, connection: AsyncConnection, boots_s: Mapping[str, float]
    ) -> dict[str, NodesAsk]:
        """Return the requests for nodes, and store the surplus nodes and the state of the requests.

        Args:
            connection: Connection of the transaction that has written the pools' numbers.
            boots_s: Longest boot time of each pool, in seconds.
        """
        groups = await nodes_repository.groups(connection, self._actuators)
        asks = {name: asked_nodes(group) for name, group in groups.items()}
        surplus = {node_id for ask in asks.values() for node_id in ask.surplus}
        await nodes_repository.write_surplus(connection, surplus)
        late_s = {
            name: EFFECT_FACTOR * max((boots_s.get(it, 0.0) for it in group.replicas), default=0.0)
            for name, group in groups.items()
        }
        outcomes = {name: it.outcome or AskOutcome("kept") for name, it in self._tasks.items()}
        await nodes_repository.write_asks(connection, asks, outcomes, late_s)
        return asks

    def offer(self, asks: Mapping[str, NodesAsk]) -> None:
        """Replace the requests of all actuators.

        An actuator that is missing in `asks` receives no request.
        """
        self._show(asks)
        for name, asker in self._tasks.items():
            asker.offer(asks.get(name))

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for asker in self._tasks.values():
                tasks.create_task(asker.run())


class _Asker:
    """Requests nodes from one actuator."""

    def __init__(self, actuator: Actuator, count: Callable[[str, str], None]) -> None:
        self._actuator = actuator
        self._count = count
        self._ask: NodesAsk | None = None
        self._is_offered = asyncio.Event()
        self._failures = 0
        self._set: int | None = None  # number of nodes in the last request
        self._last: tuple[NodesAsk, float] | None = None
        self.outcome: AskOutcome | None = None

    def offer(self, ask: NodesAsk | None) -> None:
        self._ask = ask
        if ask is None:
            self.outcome, self._set, self._last = None, None, None
            self._is_offered.clear()
        else:
            self._is_offered.set()

    async def run(self) -> None:
        while True:
            await self._is_offered.wait()
            self._is_offered.clear()
            ask = self._ask
            if ask is None:
                continue
            again_s = 0.0
            try:
                outcome = await self._send(ask)
                self._failures = 0
            except SendError as error:
                outcome = AskOutcome("failed", error.reason)
                again_s = max(error.after_ms / 1000, self._again_s())
            except Exception as error:  # an error of one request must not end the task
                log.exception("node_request_failed", actuator=self._actuator.name)
                outcome = AskOutcome("failed", f"{type(error).__name__}: see the log")
                again_s = self._again_s()
            if self._ask is not None:  # None if another control plane has become the leader
                self._log_outcome(outcome, ask)
            await asyncio.sleep(min(_RETRY_MAX_S, again_s))

    def _again_s(self) -> float:
        """Record a failure, and return the seconds until the next request."""
        self._failures = min(_FAILURES_MAX, self._failures + 1)
        return _RETRY_FIRST_S * 2 ** (self._failures - 1)

    def _log_outcome(self, outcome: AskOutcome, ask: NodesAsk) -> None:
        name = self._actuator.name
        self._count(name, outcome.result)
        if outcome != self.outcome or outcome.result == "changed":
            told = log.warning if outcome.text else log.info
            said = {"result": outcome.result, "why": outcome.text}
            told("nodes_asked", actuator=name, nodes=ask.wanted, **said)
        self.outcome = outcome

    async def _send(self, ask: NodesAsk) -> AskOutcome:
        if self._actuator.kind == "webhook":
            return await self._webhook(ask)
        before, (found, now) = self._set, await set_scale(self._actuator, ask)
        self._set = now
        text = ""
        if before is not None and found != before:
            text = f"something else set {found} nodes after our {before}: scale the pools instead"
        return AskOutcome("kept" if found == now else "changed", text)

    async def _webhook(self, ask: NodesAsk) -> AskOutcome:
        is_same = self._last is not None and self._last[0] == ask
        if is_same and self._last is not None and time.monotonic() - self._last[1] < _REPEAT_S:
            return AskOutcome("kept")
        actuator = self._actuator
        body = encoded(body_of(actuator, ask))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "sluice-scaling",
            "Sluice-Delivery": new_id("delivery"),
            "Sluice-Signature": signature(
                actuator.secret.get_secret_value(), body, round(time.time())
            ),
        }
        await post(actuator.url, body, headers, is_internal=actuator.is_internal)
        self._last = (ask, time.monotonic())
        return AskOutcome("kept" if is_same else "changed")


def body_of(actuator: Actuator, ask: NodesAsk) -> dict[str, Any]:
    """Return the JSON body of a webhook, which the documentation of actuators describes."""
    return {
        "version": "1",
        "actuator": actuator.name,
        "nodes": actuator.nodes,
        "nodes_wanted": ask.step(ask.present),
        "nodes_present": ask.present,
        "nodes_to_end": list(ask.empty),
    }
