"""Reads and judges the state of the node's accelerators, and stores their cordons on disk."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from replica.agent.hardware import (
    Cordon,
    GpuReading,
    HardwareReader,
    HardwareState,
    Readings,
    Xid,
    judge,
    lift,
)
from sluice.wire.agent.v1 import agent_pb2 as agent

log = structlog.get_logger(__name__)

READ_EVERY_S = 2.0
# Seconds between two readings that error events cause. A GPU with endless errors would otherwise
# occupy the agent.
_PAUSE_S = 0.2
_SILENCE_S = 30.0  # seconds without an answer after which a driver is logged as hanging

_Result = Readings | Exception | None  # None means that the node has no accelerators


class CordonFile:
    """The file of cordons. An operator can lift all cordons by deleting this file."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "cordons.json"

    def load(self) -> HardwareState:
        """Return the saved cordons, or none if there is no file."""
        try:
            values = json.loads(self.path.read_text())
            cordons = [Cordon(**cordon) for cordon in values["cordons"]]
            accepted = frozenset((str(uuid), str(cause)) for uuid, cause in values["accepted"])
        except FileNotFoundError:
            return HardwareState()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cordons_unreadable", path=str(self.path), error=str(error))
            return HardwareState()
        return HardwareState(cordons={c.uuid: c for c in cordons}, accepted=accepted)

    def save(self, state: HardwareState) -> None:
        """Write the cordons atomically, and log an error if the disk is unwritable."""
        values: dict[str, Any] = {
            "cordons": [asdict(cordon) for cordon in state.cordons.values()],
            "accepted": sorted(state.accepted),
        }
        staging = self.path.with_suffix(".new")
        try:
            staging.write_text(json.dumps(values, indent=2))
            staging.replace(self.path)
        except OSError as error:
            log.warning("cordons_not_saved", path=str(self.path), error=str(error))

    def remove(self) -> list[str]:
        """Lift all cordons for an operator, and return their reasons."""
        reasons = [cordon.reason for cordon in self.load().cordons.values()]
        self.path.unlink(missing_ok=True)
        return reasons


class HardwareWatch:
    """The state of the node's accelerators, which `run` updates."""

    def __init__(
        self,
        file: CordonFile,
        on_change: Callable[[], None],
        on_readings: Callable[[HardwareState, Collection[Xid]], None],
    ) -> None:
        """Load the cordons that an earlier agent set.

        Args:
            file: File of cordons.
            on_change: Function that is called after a cordon was set or lifted.
            on_readings: Function that is called with all readings, for metrics.
        """
        self._file = file
        self._on_change = on_change
        self._on_readings = on_readings
        self.state = file.load()
        for cordon in self.state.cordons.values():
            log.warning("cordon_kept", gpu=cordon.uuid, reason=cordon.reason)

    async def run(self, open_reader: Callable[[], HardwareReader | None]) -> None:
        """Read and judge until cancelled, or return at once if there are no accelerators.

        Args:
            open_reader: Function that returns the reader, or None without accelerators. It runs in
                the reader's thread, because it may also hang.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Result] = asyncio.Queue()
        stopped = threading.Event()

        def post(result: _Result) -> None:
            with suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(arrived.put_nowait, result)

        def read_on() -> None:
            try:
                reader = open_reader()
                while reader is not None and not stopped.is_set():
                    post(reader.read(READ_EVERY_S))
                    stopped.wait(_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - raised in the task that waits for it
                post(error)
            else:
                post(None)

        # The reader has a daemon thread, because a thread that hangs in a driver would prevent the
        # end of the process.
        threading.Thread(target=read_on, name="hardware", daemon=True).start()
        try:
            while (result := await self._next(arrived)) is not None:
                self._take(result)
        finally:
            stopped.set()

    async def _next(self, arrived: "asyncio.Queue[_Result]") -> Readings | None:
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    result = await arrived.get()
            except TimeoutError:
                log.warning("gpus_silent", silent_s=_SILENCE_S)
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def _take(self, readings: Readings) -> None:
        if self.state.cordons and not self._file.path.exists():
            self.lift([cordon.id for cordon in self.state.cordons.values()])
        self._change(judge(self.state, readings, time.time()))
        self._on_readings(self.state, readings.xids)

    def lift(self, ids: Collection[str]) -> None:
        """Lift the cordons with these ids, which puts their accelerators back into service."""
        self._change(lift(self.state, ids))

    def why_cordoned(self, accelerators: Collection[int]) -> str:
        """Return the reason of a cordon of these accelerators, or of any if none is named."""
        cordon = self.state.cordon_of(accelerators)
        return f"GPU {cordon.index}: {cordon.reason}" if cordon else ""

    def facts(self) -> list[agent.Accelerator]:
        """Return the accelerators as messages for the control plane."""
        return [_facts(gpu, self.state.cordons.get(gpu.uuid)) for gpu in self.state.gpus]

    def _change(self, state: HardwareState) -> None:
        before, self.state = self.state, state
        if (state.cordons, state.accepted) == (before.cordons, before.accepted):
            return
        for uuid, cordon in state.cordons.items():
            if uuid not in before.cordons:
                log.error("cordon_set", gpu=uuid, index=cordon.index, reason=cordon.reason)
        for uuid in before.cordons.keys() - state.cordons.keys():
            log.info("cordon_lifted", gpu=uuid)
        self._file.save(state)
        self._on_change()


def _facts(gpu: GpuReading, cordon: Cordon | None) -> agent.Accelerator:
    facts = agent.Accelerator(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        temperature_c=gpu.temperature_c,
        power_w=gpu.power_w,
    )
    if cordon is not None:
        facts.cordon.CopyFrom(
            agent.Cordon(
                id=cordon.id,
                reason=cordon.reason,
                since_unix_ms=round(cordon.since_unix_s * 1000),
            )
        )
    return facts
