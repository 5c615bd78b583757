"""Readers of real traffic, from published traces and exports of the ClickHouse table `requests`.

A trace has only lengths and times, because no format contains text. A file may be gzipped (`.gz`).

* `mooncake`: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the
  chained ids of 512-token blocks. Time stamps are rounded to 3 seconds, so each request is moved by
  a seeded random offset. Prompts with two or more leading blocks in common form a session.
* `azure`: CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. The trace has no data about
  shared prefixes, so every prompt has separate blocks.
* `sluice`: JSON lines with fields of `RequestEvent` (`SELECT ... FORMAT JSONEachRow`):
  `received_at_unix_ms`, `prompt_tokens`, `output_tokens`, `session_hash`, `tenant_id`. A later turn
  of a session is assumed to begin with the session's previous prompt. Hash 0 means no session.
"""

import csv
import datetime as dt
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

from sim.workload import Trace, TraceRequest

BLOCK_TOKENS = 512  # tokens per block of the published hashes, while engines have smaller blocks
BUCKET_S = 3.0
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SLUICE_FIELDS = ("received_at_unix_ms", "prompt_tokens", "output_tokens")


class TraceError(ValueError):
    """Raised if a trace cannot be read, with a message that names file and line."""


def load(path: Path, format_name: str, *, seed: int = 0, requests_max: int | None = None) -> Trace:
    """Read a trace file.

    Args:
        path: The file.
        format_name: One of `FORMATS`.
        seed: Seed of the random offsets of arrival times.
        requests_max: Most requests to read, from the beginning of the file.

    Raises:
        TraceError: The file is missing, empty or malformed.
    """
    read = FORMATS.get(format_name)
    if read is None:
        raise TraceError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}")
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    try:
        with _open(path) as file:
            requests = list(islice(read(path, file, draw), requests_max))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: no requests")
    requests.sort(key=lambda request: request.arrived_s)
    first_s = requests[0].arrived_s
    name = path.name.removesuffix(".gz").rpartition(".")[0].removesuffix("_trace")
    return Trace(
        name,
        BLOCK_TOKENS,
        tuple(replace(request, arrived_s=request.arrived_s - first_s) for request in requests),
    )


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8", newline="")


@dataclass(frozen=True, slots=True)
class _Place:
    """A line of a file, for messages."""

    path: Path
    line: int

    def error(self, problem: str) -> TraceError:
        return TraceError(f"{self.path}:{self.line}: {problem}")

    def number(self, row: dict[str, Any], name: str) -> int:
        """Return the field `name` of a row, which is a whole number of at least 0."""
        value = row.get(name)
        if value is None:
            raise self.error(f"no {name}")
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise self.error(f"{name} is {value!r}, not a whole number") from None
        if number < 0:
            raise self.error(f"{name} is negative")
        return number


def _json_rows(path: Path, file: IO[str]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        place = _Place(path, line)
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise place.error(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise place.error("not a JSON object")
        yield place, row


def _mooncake(path: Path, file: IO[str], draw: random.Random) -> Iterator[TraceRequest]:
    owners: dict[int, int] = {}  # block -> first session whose prompt contained it
    sessions = 0
    for place, row in _json_rows(path, file):
        blocks = row.get("hash_ids")
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise place.error("hash_ids is not a list of whole numbers")
        prompt_tokens = max(1, place.number(row, "input_length"))
        if not blocks:
            raise place.error("hash_ids is empty")
        known = 0
        for block in blocks:
            if block not in owners:
                break
            known += 1
        if known > 1:  # all prompts share the first block, so it is not counted
            session = owners[blocks[known - 1]]
        else:
            session = sessions
            sessions += 1
        for block in (*blocks[1:], blocks[0]):
            owners.setdefault(block, session)
        yield TraceRequest(
            arrived_s=place.number(row, "timestamp") / 1e3 + draw.random() * BUCKET_S,
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, place.number(row, "output_length")),
            blocks=tuple(blocks),
            session=session,
        )


def _azure(path: Path, file: IO[str], draw: random.Random) -> Iterator[TraceRequest]:
    rows = csv.DictReader(file)
    if missing := [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]:
        raise _Place(path, 1).error(f"no column {', '.join(missing)}")
    blocks = count()
    for row in rows:
        place = _Place(path, rows.line_num)
        stamp = row["TIMESTAMP"] or ""
        try:
            arrived = dt.datetime.fromisoformat(stamp)
        except ValueError:
            raise place.error(f"TIMESTAMP is {stamp!r}, not a time") from None
        if arrived.tzinfo is None:
            arrived = arrived.replace(tzinfo=dt.UTC)
        prompt_tokens = max(1, place.number(row, "ContextTokens"))
        yield TraceRequest(
            arrived_s=arrived.timestamp(),
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, place.number(row, "GeneratedTokens")),
            blocks=tuple(islice(blocks, -(-prompt_tokens // BLOCK_TOKENS))),
            session=-1 - draw.getrandbits(62),
        )


def _sluice(path: Path, file: IO[str], draw: random.Random) -> Iterator[TraceRequest]:
    chains = SessionChains()
    for place, row in _json_rows(path, file):
        arrived_ms, prompt_tokens, output_tokens = (
            place.number(row, name) for name in _SLUICE_FIELDS
        )
        if not prompt_tokens:
            continue  # refused before its prompt was tokenized, so it never reached a router
        session = place.number(row, "session_hash") if row.get("session_hash") else 0
        yield TraceRequest(
            arrived_s=arrived_ms / 1e3,
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, output_tokens),
            blocks=chains.blocks(session, prompt_tokens),
            session=session or -1 - draw.getrandbits(62),
            tenant=str(row.get("tenant_id") or ""),
        )


class SessionChains:
    """Block ids for sessions whose prompts only grow at the end.

    Args:
        block_tokens: Tokens per block.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._ids = count()
        self._chains: dict[int, tuple[tuple[int, ...], int]] = {}

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """Return new blocks for a number of tokens, shared with no other prompt."""
        return tuple(islice(self._ids, -(-tokens // self._block_tokens)))

    def blocks(
        self, session: int, prompt_tokens: int, system: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return the blocks of a session's next prompt.

        Args:
            session: Session of the request, or 0 for a request that shares no prefix.
            prompt_tokens: Tokens of the whole prompt.
            system: Full blocks of the system prompt with which the session begins.
        """
        blocks, tokens = self._chains.get(session, (system, len(system) * self._block_tokens))
        full = min(tokens, prompt_tokens) // self._block_tokens
        wanted = -(-prompt_tokens // self._block_tokens)
        chain = (*blocks[:full], *islice(self._ids, wanted - full))
        if session:
            self._chains[session] = (chain, prompt_tokens)
        return chain


Reader = Callable[[Path, IO[str], random.Random], Iterator[TraceRequest]]
FORMATS: dict[str, Reader] = {"mooncake": _mooncake, "azure": _azure, "sluice": _sluice}
