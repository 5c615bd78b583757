"""Records started engines on disk, so that the node's next agent can adopt them.

A new agent knows nothing of the engines that an earlier agent left running, except these records. A
record identifies an engine by its process id, the start time of that process, and the marks in its
environment. Records are not synced to the disk, because a crash of the machine ends the engines,
too.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from replica.agent.replica_state import EngineSpec
from sluice.procfs import start_ticks

log = structlog.get_logger(__name__)

_FORMAT = 2  # a record of another format comes from another version, whose engines are not adopted
_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of one running engine, from which the next agent adopts the engine.

    Attributes:
        replica_id: Id of the engine's replica.
        spec: Spec with which the engine was started.
        run: Number of the run within the replica.
        pid: Process id of the first process, which leads the engine's process group.
        start_ticks: Start time of that process, in clock ticks as in /proc.
        grpc_port: Port of Triton's gRPC.
        metrics_port: Port of Triton's metrics.
        was_ready: Whether the engine has answered a canary.
        restarts: Number of the replica's engines that failed before this one.
        is_asleep: Whether the engine has released its KV memory.
    """

    replica_id: str
    spec: EngineSpec
    run: int
    pid: int
    start_ticks: int
    grpc_port: int
    metrics_port: int
    was_ready: bool = False
    restarts: int = 0
    is_asleep: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the recorded process still exists. A later process with its id does not count."""
        return self.start_ticks > 0 and start_ticks(self.pid) == self.start_ticks


class RunFile:
    """The record of a replica's engine, in the replica's directory."""

    def __init__(self, home: Path) -> None:
        self._path = home / _FILE
        self._record: RunRecord | None = None

    def save(self, record: RunRecord) -> None:
        """Write the record atomically.

        An error of the disk is logged, not raised. The engine serves anyway, but the next agent
        kills it and starts a new one instead of adopting it.
        """
        staging = self._path.with_suffix(".new")
        try:
            staging.write_text(json.dumps({"format": _FORMAT, **asdict(record)}))
            staging.replace(self._path)
        except OSError as error:
            log.warning("run_not_recorded", path=str(self._path), error=str(error))
        self._record = record

    def mark_ready(self) -> None:
        """Record that the engine has answered a canary."""
        if self._record is not None and not self._record.was_ready:
            self.save(replace(self._record, was_ready=True))

    def mark_asleep(self, *, is_asleep: bool) -> None:
        """Record that the engine sleeps, or is awake again."""
        if self._record is not None and self._record.is_asleep != is_asleep:
            self.save(replace(self._record, is_asleep=is_asleep))

    def load(self) -> RunRecord | None:
        """Return the saved record, or None if there is none that this version can read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._record = _record_from(json.loads(self._path.read_text()))
        return self._record

    def remove(self) -> None:
        """Delete the record after the engine is gone."""
        self._record = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _record_from(values: dict[str, Any]) -> RunRecord | None:
    if values.pop("format") != _FORMAT:
        return None
    spec = values.pop("spec")
    options = tuple((str(name), str(value)) for name, value in spec["options"])
    accelerators = tuple(int(index) for index in spec["accelerators"])
    spec = EngineSpec(str(spec["engine"]), str(spec["base_digest"]), options, accelerators)
    return RunRecord(spec=spec, **values)
