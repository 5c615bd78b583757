"""Routes of the admin REST, with path, permission, and a part of the OpenAPI document.

    Route("POST", "/v1/things", self.create, Action.WRITE_MODELS, "things", operation("Make one"))

A route without an action needs no key, for example health and metrics. Handlers of writes use
`control_plane.http.writes`, which makes the writes audited and idempotent.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from control_plane.access.roles import Action, Actor

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_PATTERN = re.compile(r"\{(\w+):[^{}]+\}")
_PARAMETER = re.compile(r"\{[^{}]+\}")

ACTOR = web.RequestKey("actor", Actor)
REQUEST_ID = web.RequestKey("request_id", str)


def _no_operation() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """A method on a path, with its handler and permission.

    Attributes:
        method: GET, or one of `WRITES`.
        path: Path in aiohttp's form, including patterns.
        handler: Handler of requests.
        action: Permission that a caller needs, or None if the route needs no key.
        kind: Kind of the objects, for the audit log.
        operation: Part of the OpenAPI document, which `describe.operation` returns.
        is_audited: Whether every success writes an audit row. Only a write without a visible effect
            (an upload's chunk, or a query too long for a URL) may set it to false.
        is_noted: Whether a successful read writes an audit row as well.
    """

    method: str
    path: str
    handler: Handler
    action: Action | None
    kind: str = ""
    operation: dict[str, Any] = field(default_factory=_no_operation)
    is_audited: bool = True
    is_noted: bool = False

    @property
    def is_write(self) -> bool:
        """Whether the method is a write."""
        return self.method in WRITES

    @property
    def query(self) -> set[str]:
        """The names of the query parameters."""
        parameters: list[dict[str, Any]] = self.operation.get("parameters", [])
        return {parameter["name"] for parameter in parameters if parameter["in"] == "query"}

    @property
    def public_path(self) -> str:
        """The path in OpenAPI's form, without patterns."""
        return _PATTERN.sub(r"{\1}", self.path)

    @property
    def words(self) -> str:
        """The path without its parameters."""
        return _PARAMETER.sub("", self.path)

    @property
    def read_only(self) -> frozenset[str]:
        """Fields of the answer that the request body of a PUT or PATCH does not set."""
        if self.method not in {"PUT", "PATCH"} or "requestBody" not in self.operation:
            return frozenset()
        answers = [answer.get("content") for answer in self.operation["responses"].values()]
        bodies = [self.operation["requestBody"]["content"], *filter(None, answers)]
        taken, *shown = (set(body["application/json"]["schema"]["properties"]) for body in bodies)
        return frozenset(set[str]().union(*shown) - taken)


ROUTE = web.RequestKey("route", AdminRoute)
# Read-only fields that a body repeats from an answer. Unchanged fields are accepted, so that a
# client can read, edit and write a whole object.
REPEATED = web.RequestKey("repeated", dict[str, Any])
