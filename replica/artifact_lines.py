"""Encodes the messages between an engine and its node's agent about artifacts, as lines of JSON.

With every change, the engine sends its complete lists of awaited artifacts and of files in use. So
an agent that has restarted needs no earlier line. The agent sends the outcomes of the waits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

LINE_BYTES_MAX = 1 << 20
_DIGESTS_MAX = 8192  # largest number of digests in one line


class LineError(ValueError):
    """A line is not a valid message of the protocol."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A line from the engine with the artifacts that it awaits and the artifacts that it uses.

    Attributes:
        waits: Digests of all artifacts for which requests wait.
        reads: Digests of all artifacts whose files must stay on the disk.
        uses: Digest -> number of requests for the artifact since the engine's last line.
    """

    waits: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    uses: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class ArtifactOutcome:
    """A line from the agent with the outcome of a wait.

    An outcome without an error code means that the artifact is on the disk.
    """

    digest: str
    code: str = ""
    message: str = ""


def encode_request(ask: Ask) -> bytes:
    """Return the line of an engine's message."""
    return _line(
        {
            "waits": sorted(ask.waits),
            "reads": sorted(ask.reads),
            "uses": dict(ask.uses),
        }
    )


def decode_request(line: bytes) -> Ask:
    """Return the message in an engine's line. Raises LineError if it is invalid."""
    fields = _fields(line, {"waits": list, "reads": list, "uses": dict})
    waits, reads, uses = fields["waits"], fields["reads"], fields["uses"]
    if max(len(waits), len(reads), len(uses)) > _DIGESTS_MAX:
        raise LineError(f"more than {_DIGESTS_MAX} digests")
    if not all(type(count) is int and count >= 0 for count in uses.values()):
        raise LineError("uses are no counts")
    if not all(isinstance(digest, str) for digest in (*waits, *reads)):
        raise LineError("digests are no texts")
    return Ask(frozenset(waits), frozenset(reads), uses)


def encode_outcome(told: ArtifactOutcome) -> bytes:
    """Return the line of an agent's message."""
    return _line({"digest": told.digest, "code": told.code, "message": told.message})


def decode_outcome(line: bytes) -> ArtifactOutcome:
    """Return the message in an agent's line. Raises LineError if it is invalid."""
    return ArtifactOutcome(**_fields(line, {"digest": str, "code": str, "message": str}))


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _fields(line: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    try:
        decoded: object = json.loads(line)
    except ValueError as error:
        raise LineError(str(error)) from None
    if not isinstance(decoded, dict):
        raise LineError("not an object")
    fields = cast("dict[str, Any]", decoded)
    if fields.keys() != kinds.keys():
        raise LineError(f"fields are {sorted(fields)}, not {sorted(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise LineError(f"{name} is no {kind.__name__}")
    return fields
