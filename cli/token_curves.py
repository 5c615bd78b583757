"""Reads a file of requests as sums of tokens per bucket of time, for a replay of scaling.

A file has one of three forms, and may be gzipped (`.gz`):

* CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, as Azure publishes traces
* JSON lines with `timestamp` (ms), `input_length` and `output_length`, as Mooncake publishes them
* JSON lines with `received_at_unix_ms`, `prompt_tokens` and `output_tokens`, as ClickHouse exports
  the table `requests` (`FORMAT JSONEachRow`)
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

_BUCKET_S = 15  # seconds between two plans, and the least bucket
_BUCKETS_MAX = 6_000  # in one request to the control plane, so a longer file gets longer buckets
_SPAN_MAX_S = 48 * 3600
_CSV = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Names of time, prompt tokens and output tokens in JSON lines.
_JSON = (
    ("timestamp", "input_length", "output_length"),
    ("received_at_unix_ms", "prompt_tokens", "output_tokens"),
)

Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens


class CurveError(ValueError):
    """A file cannot be read as requests. The message names file and line."""


@dataclass(frozen=True, slots=True)
class TokenCurve:
    """The tokens of requests by the bucket of their arrival, from the first request on.

    Attributes:
        bucket_s: Seconds per bucket.
        prompt_tokens: Sum of the prompt tokens of each bucket.
        output_tokens: Sum of the output tokens of each bucket.
    """

    bucket_s: int
    prompt_tokens: list[int]
    output_tokens: list[int]


def read_curve(path: Path) -> TokenCurve:
    """Read a file of requests.

    Raises:
        CurveError: The file is missing, empty or malformed, or too long.
    """
    try:
        with _open(path) as file:
            first = file.readline()
            file.seek(0)
            rows = list(_csv_rows(path, file) if first[:1] != "{" else _json_rows(path, file))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise CurveError(f"{path}: {error}") from None
    if not rows:
        raise CurveError(f"{path}: no requests")
    return _curve(path, rows)


def _curve(path: Path, rows: list[Row]) -> TokenCurve:
    began_s = min(at_s for at_s, _, _ in rows)
    span_s = max(at_s for at_s, _, _ in rows) - began_s
    if span_s >= _SPAN_MAX_S:
        raise CurveError(f"{path}: {span_s / 3600:.0f} hours of requests, at most 48: cut the file")
    bucket_s = _BUCKET_S * (1 + int(span_s // (_BUCKET_S * _BUCKETS_MAX)))
    count = int(span_s // bucket_s) + 1
    found = TokenCurve(bucket_s, [0] * count, [0] * count)
    for at_s, prompt, output in rows:
        bucket = int((at_s - began_s) // bucket_s)
        found.prompt_tokens[bucket] += prompt
        found.output_tokens[bucket] += output
    return found


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _csv_rows(path: Path, file: Iterable[str]) -> Iterator[Row]:
    rows = csv.DictReader(file)
    if missing := [name for name in _CSV if name not in (rows.fieldnames or ())]:
        forms = "a CSV of Azure's columns, or JSON lines (see --help)"
        raise CurveError(f"{path}:1: no column {', '.join(missing)}; give {forms}")
    for row in rows:
        place = f"{path}:{rows.line_num}"
        stamp = row["TIMESTAMP"] or ""
        try:
            at = datetime.fromisoformat(stamp)
        except ValueError:
            raise CurveError(f"{place}: TIMESTAMP is {stamp!r}, not a time") from None
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        yield at_s, _number(place, row, _CSV[1]), _number(place, row, _CSV[2])


def _json_rows(path: Path, file: Iterable[str]) -> Iterator[Row]:
    names: tuple[str, str, str] | None = None
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        place = f"{path}:{line}"
        try:
            row = json.loads(text)
        except ValueError as error:
            raise CurveError(f"{place}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise CurveError(f"{place}: not a JSON object")
        if names is None:
            names = next((it for it in _JSON if it[0] in row), None)
            if names is None:
                raise CurveError(f"{place}: no {' and no '.join(it[0] for it in _JSON)}")
        at_ms, prompt, output = (_number(place, row, name) for name in names)
        yield at_ms / 1e3, prompt, output


def _number(place: str, row: Mapping[str, Any], name: str) -> int:
    """Return a whole number of at least 0."""
    value = row.get(name)
    try:
        number = int(value)  # pyright: ignore[reportArgumentType] - a TypeError is caught
    except (TypeError, ValueError, OverflowError):
        raise CurveError(f"{place}: {name} is {value!r}, not a whole number") from None
    if not 0 <= number <= 1 << 53:
        raise CurveError(f"{place}: {name} is {number}, not within 0 and 2^53")
    return number
