"""Begins batches by reading their input files, and ends them by writing their output files.

Each step is a transaction that can be repeated. So a step continues the work of a killed control
plane, and each line is answered once. Two control planes may do the same work concurrently.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.batches import repository
from control_plane.batches.lines import ParsedFile, answered, parsed, unanswered
from control_plane.database import Database, DatabaseDownError
from control_plane.records import repository as records
from control_plane.records.repository import NoRecordError
from control_plane.work_poll import MayHaveWork, unknown
from sluice.files import KIND, PART_BYTES, PREFIX, file_content, part_id
from sluice.lifecycle import run_every
from sluice.response_ids import new_owned_id
from sluice.shared_secret import SharedSecret
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)

_EVERY_S, _STEP_S, _DEADLINE_S = 1.0, 300.0, 10.0
_BATCHES_AT_ONCE, _LINES_AT_ONCE, _ROWS_AT_ONCE = 16, 2000, 16
_ENDS = {"finalizing": "completed", "cancelling": "cancelled", "expiring": "expired"}
_WHY = {
    "cancelling": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expiring": ("batch_expired", "This request could not be answered before the batch expired."),
}

_PURPOSE = "batch_output"

_Result = TypeVar("_Result")
_LineOf = Callable[[wire.Batch, Any], bytes]


class BatchLoop:
    """The loop of batches in one control plane. `run` must be started in a TaskGroup."""

    def __init__(
        self, database: Database, secret: SharedSecret, may_have_work: MayHaveWork = unknown
    ) -> None:
        """Create the loop.

        Args:
            database: Database of batches.
            secret: Derives the ids of output files.
            may_have_work: Tells whether there may be batches that have not ended.
        """
        self._database, self._secret = database, secret
        self._may_have_work = may_have_work

    async def run(self) -> None:
        """Run the loop until cancelled."""
        await run_every(
            _EVERY_S,
            self._step_if_due,
            name="batches",
            expected=(DatabaseDownError, DBAPIError),
            step_timeout_s=_STEP_S,
        )

    async def _step_if_due(self) -> None:
        if self._may_have_work():
            await self.step()

    async def step(self) -> None:
        """Begin the waiting batches, and end the finished batches."""
        if not await self._database.run_singly(repository.has_live, deadline_s=_DEADLINE_S):
            return
        await self._run(repository.expire)
        await self._run(repository.finish_answered)
        for batch in await self._with_status(("validating",)):
            await self._begin(batch)
        for batch in await self._with_status(repository.ENDING):
            await self._end(batch)

    async def _with_status(self, statuses: Sequence[str]) -> list[wire.Batch]:
        return await self._run(
            lambda connection: repository.with_status(connection, statuses, _BATCHES_AT_ONCE)
        )

    async def _begin(self, batch: wire.Batch) -> None:
        """Read the input file of a batch, and store its lines for gateways."""
        try:
            content = await self._content(batch)
        except NoRecordError:
            content = b""
        found: ParsedFile = await asyncio.to_thread(parsed, content, batch.endpoint)
        if found.mistakes:
            errors = json.dumps(found.mistakes).encode()
            await self._move(batch, ("validating",), "failed", errors=errors)
            return
        for start in range(0, len(found.lines), _LINES_AT_ONCE):
            some = found.lines[start : start + _LINES_AT_ONCE]
            await self._run(
                lambda connection, some=some: repository.add_lines(connection, batch.id, some)
            )
        await self._move(batch, ("validating",), "in_progress", total=len(found.lines))
        log.info("batch_begun", batch_id=batch.id, lines=len(found.lines))

    async def _content(self, batch: wire.Batch) -> bytes:
        """Return the input file of a batch. Raises NoRecordError if the file does not exist."""
        content, page = bytearray(), wire.ListItemsRequest()
        page.tenant_id, page.id, page.is_ascending = batch.tenant_id, batch.input_file_id, True
        while True:
            found = await self._run(lambda connection: records.items(connection, page, 8))
            for part in found:
                content += part.content
            if len(found) < 8:
                return bytes(content)
            page.after = found[-1].id

    async def _end(self, batch: wire.Batch) -> None:
        """Write the output files of a batch, and mark the batch as ended."""
        ids = [new_owned_id(PREFIX, batch.tenant_id, self._secret) for _ in "12"]
        ids = await self._run(lambda connection: repository.named_files(connection, batch.id, ids))
        files = {
            "output_file_id": await self._write(batch, "output", ids[0], _good),
            "error_file_id": await self._write(batch, "error", ids[1], _bad),
        }
        await self._move(batch, (batch.status,), _ENDS[batch.status], **files)
        await self._run(lambda connection: repository.drop_lines(connection, batch.id))
        log.info("batch_ended", batch_id=batch.id, status=_ENDS[batch.status])

    async def _write(self, batch: wire.Batch, name: str, file_id: str, line_of: _LineOf) -> str:
        """Write the missing parts of a file, and return its id.

        A file without lines is not written, and the result is an empty text. Only one
        piece at a time is in memory, because results may have gigabytes.
        """
        piece, number, size, after = bytearray(), 0, 0, 0
        while rows := await self._results(batch, after):
            after = rows[-1].number
            for row in rows:
                piece += line_of(batch, row)
            while len(piece) >= PART_BYTES:
                await self._part(batch, name, file_id, number, bytes(piece[:PART_BYTES]))
                del piece[:PART_BYTES]
                number, size = number + 1, size + PART_BYTES
        if piece:
            await self._part(batch, name, file_id, number, bytes(piece))
        size += len(piece)
        if not size:
            return ""
        content = file_content(_filename(batch, name), _PURPOSE, size)
        await self._run(
            lambda connection: records.change(connection, batch.tenant_id, file_id, {}, content)
        )
        return file_id

    async def _part(
        self, batch: wire.Batch, name: str, file_id: str, number: int, piece: bytes
    ) -> None:
        part = wire.RecordItem(id=part_id(number), content=piece)
        if number:
            request = wire.AppendItemsRequest(tenant_id=batch.tenant_id, id=file_id, items=[part])
            await self._run(lambda connection: records.append(connection, request))
            return
        record = wire.Record(
            id=file_id,
            tenant_id=batch.tenant_id,
            kind=KIND,
            created_at_unix_ms=repository.now_ms(),
            content=file_content(_filename(batch, name), _PURPOSE, 0, "uploaded"),
        )
        await self._run(lambda connection: records.create(connection, record, [part]))

    async def _results(self, batch: wire.Batch, after: int) -> Sequence[Any]:
        return await self._run(
            lambda connection: repository.results(connection, batch.id, after, _ROWS_AT_ONCE)
        )

    async def _move(
        self, batch: wire.Batch, before: Sequence[str], status: str, **values: Any
    ) -> None:
        await self._run(
            lambda connection: repository.move(connection, batch.id, before, status, **values)
        )

    async def _run(self, work: Callable[[AsyncConnection], Awaitable[_Result]]) -> _Result:
        return await self._database.run(work, deadline_s=_DEADLINE_S)


def _is_good(row: Any) -> bool:
    return row.status is not None and row.status < 400


def _good(batch: wire.Batch, row: Any) -> bytes:
    """Return the output line of a successful request, or an empty line for other requests."""
    return _output_line(batch, row) if _is_good(row) else b""


def _bad(batch: wire.Batch, row: Any) -> bytes:
    """Return the output line of a failed or unanswered request, or an empty line for others."""
    if row.status is None:
        return unanswered(_line_id(batch, row), row.custom_id, *_WHY[batch.status])
    return b"" if _is_good(row) else _output_line(batch, row)


def _output_line(batch: wire.Batch, row: Any) -> bytes:
    line_id = _line_id(batch, row)
    return answered(line_id, row.custom_id, row.status, row.request_id, row.result)


def _line_id(batch: wire.Batch, row: Any) -> str:
    return f"batch_req_{batch.id.partition('_')[2][:26]}{row.number:05d}"


def _filename(batch: wire.Batch, name: str) -> str:
    return f"{batch.id}_{name}.jsonl"
